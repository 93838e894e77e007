"""The commands that README.md, docs and examples show, and how `test_commands` runs each of them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT = Path(__file__).parents[2]
_COMMAND: Final = re.compile(
    r"(?:\w+=\S+ )*(?:unicron|python3?|torchrun|make|pip|sbatch|kubectl|prometheus|eval|torchft\S+|deploy/\S+) "
)
_FENCE: Final = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def pages() -> list[Path]:
    """Return the documents; the commands of docs/first-day.md are run by `test_first_day`."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").rglob("*.py"))]
    return [path for path in found if path.name != "first-day.md"]


def commands_of(page: Path) -> list[str]:
    """Return the commands in code blocks of a page, or of an example's docstring, without comments."""
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".py":
        text = text.split('"""', 2)[1]  # as in the file: the end of a line may be escaped
    shown = [line for kind, block in _FENCE.findall(text) if kind == "bash" for line in _joined(block).splitlines()]
    shown += re.findall(r"^    (\S.*)$", _joined(_FENCE.sub("", text)), re.MULTILINE)
    lines = [re.split(r"\s{2,}|\s#", line)[0].strip() for line in shown]
    return [line for line in lines if _COMMAND.match(f"{line} ")]


def _joined(text: str) -> str:
    return re.sub(r"[ ]*\\\n\s*", " ", text)


def documented() -> dict[str, str]:
    """Return each documented command with the first page that shows it."""
    found: dict[str, str] = {}
    for page in pages():
        for command in commands_of(page):
            found.setdefault(command, str(page.relative_to(ROOT)))
    return found


@dataclass(frozen=True, kw_only=True)
class Run:
    """How a documented command is run, as it is written but for these changes."""

    replace: tuple[tuple[str, str], ...] = ()
    """Texts that are replaced, for a shorter run."""
    add: str = ""
    """Words added at the end."""
    folder: str = "user"
    """Where it runs: ``checkout`` has the repository's files without its packages, ``user`` a user's own files, and
    ``sweep`` a program with Hydra."""
    parsed: bool = False
    """Whether only the script's reading of its command line is tested: see `parsing`."""
    status: int = 0
    says: str = ""
    """Text of its output."""
    at_once: int = 1
    """Number of shells in which it runs at the same time."""


PORT: Final = "--rdzv-backend unicron", "--rdzv-backend unicron --rdzv-endpoint 127.0.0.1:29461"
ELSEWHERE: Final = {
    "make ": "a suite or a demonstration of the checkout: test_make_targets_exist, tests/demo, tests/fsdp",
    "pip install": "the environment of this test is such an installation; the index is not asked",
    "sbatch ": "needs Slurm",
    "UNICRON_ENDPOINT=HOST:29461 UNICRON_TOKEN=... deploy/slurm": "needs Slurm",
    "kubectl ": "needs Kubernetes",
    "prometheus ": "needs Prometheus: test_scrape",
    "make gpu": "needs a GPU",
    "torchrun --rdzv-backend unicron --rdzv-endpoint HOST:PORT": "states the form of a daemon's command",
    "torchrun --rdzv-backend unicron --rdzv-endpoint a:29461,b:29461": "two coordinators: test_endpoints",
    "unicron agent --endpoint a:29461,b:29461": "two coordinators: test_endpoints",
    "unicron state export state.json store=etcd": "needs etcd: test_transfer",
    "unicron state import state.json store=etcd": "needs etcd: test_transfer",
}
"""Beginnings of commands that cannot run here, with the reasons."""

_BENCHMARK: Final = Run(parsed=True)
_HYDRA: Final = Run(add="--cfg job")
_REFUSED: Final = Run(
    folder="sweep",
    add="hydra.launcher.embedded=false hydra.launcher.endpoint=127.0.0.1:1",
    status=1,
    says="127.0.0.1:1",
)
"""A sweep whose cluster does not exist: programs find the launcher. Others run theirs."""

ALONE: Final = {
    "python benchmarks/": _BENCHMARK,
    "unicron coordinator cluster=network": _HYDRA,
    "unicron coordinator detection=fast": _HYDRA,
    "unicron coordinator --cfg job": Run(),
    "unicron coordinator --help": Run(),
    "unicron coordinator --info": Run(),
    "unicron coordinator --config-dir DIR": Run(add="--cfg job"),
    "unicron coordinator 'health.patterns": Run(add="--cfg job", says="lustre.*evicted"),
    "unicron coordinator 'coordinator.hook=": Run(add="--cfg job", says="/opt/notify.sh"),
    "unicron state export state.json store.state_dir=": Run(
        replace=(("/var/lib/unicron/state", "state"),), status=2, says="expected the database of a coordinator"
    ),
    "unicron plan --example": Run(),
    "unicron plan cluster.yaml": Run(),
    "eval ": Run(),
    "unicron completion zsh": Run(),
    "unicron export checkpoints/last.ckpt": Run(),
    "python -m unicron_lightning.simulate -m experiment=figure3": Run(
        add="policy=megatron,oobleck seed=0 output.pictures=false"
    ),
    "python -m unicron_lightning.simulate -m policy=unicron,megatron,oobleck": Run(
        replace=(("trace=a,b", "trace=b"), ("seed='range(5)'", "seed=0 trace.days=0.1 output.pictures=false"))
    ),
    "python -m unicron_lightning.simulate -m workload=file": Run(
        replace=(("range(10)", "range(1)"),), add="trace.days=0.1 output.pictures=false"
    ),
    "python -m unicron_lightning.simulate policy": _HYDRA,
    "python -m unicron_lightning.simulate trace=faults": Run(add="output.pictures=false"),
    "python train.py": _REFUSED,
    "python examples/sweep.py degree=3": Run(folder="checkout", add="steps=3", says="validation loss"),
    "python examples/sweep.py --multirun": Run(
        folder="checkout", replace=(("1,3,9", "1,3"), ("0.1,0.01", "0.1")), add="steps=3"
    ),
    "python examples/fsdp_gpt.py --demo": Run(parsed=True),
    "python examples/moe_gpt.py --demo": Run(parsed=True),
    "python examples/loop_gpt.py --demo": Run(parsed=True),
    "python examples/loop_gpt_before.py": Run(parsed=True),
    "python examples/loop_gan.py --demo": Run(parsed=True),
    "python examples/loop_gan_before.py": Run(parsed=True),
    "python examples/loop_shards.py --demo": Run(parsed=True),
    "torchrun --nnodes 1:4": Run(replace=(("HOST", "127.0.0.1"),), says="finished 2 steps"),
    "torchrun --nnodes 1:3": Run(folder="checkout", replace=(PORT,), add="--steps 2", says="finished 2 steps"),
    "torchrun --nnodes 1:2": Run(folder="checkout", replace=(PORT,), add="--epochs 1 --images 64", says="accuracy"),
    "torchrun --nnodes 2:4": Run(
        folder="checkout", replace=(PORT,), add="--steps 2", says="finished 2 steps", at_once=2
    ),
    "torchrun --nnodes 3:4": Run(
        folder="checkout", replace=(PORT, ("3:4", "2:4")), add="--steps 2", says="max_steps=2", at_once=2
    ),
    "unicron run examples/porting/pretrain_gpt.py --workers 2 -- --devices 2 --steps 20": Run(
        folder="checkout",
        replace=(("unicron run", "python"), ("--workers 2 -- --devices 2 --steps 20", "--steps 2")),
        says="after 2 steps",
    ),
    "unicron run examples/porting/pretrain_gpt.py": Run(
        parsed=True, replace=(("unicron run", "python"), ("--workers 2 -- ", ""))
    ),
}
"""Beginnings of commands that need no coordinator."""

CLUSTER: Final = {
    "unicron coordinator coordinator.allow_injection=true": Run(add="coordinator.port=29461"),
    "unicron coordinator": Run(add="coordinator.port=29461"),
    "unicron agent": Run(),
    "unicron submit --example": Run(),
    "unicron submit gpt.yaml": Run(),
    "unicron status": Run(says="gpt"),
    "unicron checkpoints TASK": Run(replace=(("[--json]", "--json"),)),
    "unicron incidents": Run(),
    "unicron incidents --id i3": Run(status=2, says="no incident 'i3'"),
    "unicron resize TASK 4": Run(),
    "unicron calibrate": Run(says="gpt.csv: for `profile` of a job file"),
    "unicron relayout TASK --tp": Run(status=2, says="a strategy without layouts"),
    "unicron relayout TASK --shards": Run(status=2, says="a strategy without layouts"),
    "unicron inject": Run(replace=(("after=1m", "after=1s"), ("for=3s", "for=0.1s"))),
    "unicron report": Run(),
    "unicron dashboard": Run(says="/dashboard#code="),
    "unicron metrics": Run(),
    "unicron top": Run(add="--once", says="gpt"),
    "unicron logs gpt --follow": Run(replace=((" --follow", ""),)),
    "unicron drain NODE": Run(says="drained: b"),
    "unicron jobs": Run(says="gpt"),
    "unicron cancel": Run(says="gpt: cancelled"),
    "python train.py -m lr=0.1,0.01 seed=1,2,3": Run(folder="sweep", replace=(("0.1,0.01", "0.1"), ("1,2,3", "1"))),
    "unicron submit prepare.yaml": Run(says="prepare: queued"),
    "unicron submit train.yaml": Run(says="train-9: queued"),
    "unicron submit report.yaml": Run(says="report: queued"),
}
"""Beginnings of commands for a running coordinator, in the order of their runs."""


def longest(command: str) -> str | None:
    """Return the longest beginning of a command in `ALONE`, `CLUSTER` and `ELSEWHERE`."""
    return max((begin for begin in (*ALONE, *CLUSTER, *ELSEWHERE) if command.startswith(begin)), key=len, default=None)
