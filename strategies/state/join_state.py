"""The whole training state, for a joiner or a new life of the task: a checkpoint and everything that it leaves out.

The checkpoint part goes through Lightning's own restore functions, so that hooks, callbacks and data modules are called
as in a resume. A joiner runs the hooks at the start of a run and of a data epoch, and they may change what they find.
Therefore all of the state is restored twice: before these hooks, which see a resumed run, and, together with the rest
(exact counters, accumulated results, random state), when the joiner's loop is at the donor's place: before the first
batch is handed out. The same holds for a new life. If its checkpoint was written in a hook, and not at a step boundary,
Lightning restores the counters, and the rest is restored after the hooks of the run's start: those of a data epoch
follow only where the checkpoint was written before them.

Lightning then resumes at the next step or data epoch, and leaves out what is between: the rest of an iteration after
``on_train_batch_end``, such as a validation, the end of the data epoch, schedules that follow a metric, and the end of
the fit. A new life of a task does all that followed its own checkpoint, whatever hook has written it
(`run_from_checkpoint`). A user's ``ckpt_path`` is resumed as Lightning does (`leave_finished_epoch`).
"""

from __future__ import annotations

import copy
import importlib
import logging
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from typing import Any, Final

import lightning.pytorch as pl
import torch
from lightning.pytorch.loops import evaluation_loop
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.training_epoch_loop import RestartStage, _TrainingEpochLoop
from lightning.pytorch.trainer import call
from torch.optim import Optimizer

from unicron_lightning.data.seeding import random_states, restore_random_states
from unicron_lightning.strategies.metrics.loggers import adopt_versions, cut_rows, versions
from unicron_lightning.strategies.metrics.recording import RecordingResults
from unicron_lightning.strategies.metrics.sums import StepMetrics
from unicron_lightning.strategies.state import callbacks
from unicron_lightning.worker import codec
from unicron_lightning.worker.codec import unpack_parts
from unicron_lightning.worker.engine import Engine
from unicron_lightning.worker.model_state import group_names, layer_settings, regroup, set_layers
from unicron_lightning.worker.module_buffers import restore_unsaved, unsaved
from unicron_lightning.worker.operations import Agreement
from unicron_lightning.worker.sums import SumsLayout

logger = logging.getLogger(__name__)

_LEFT_OUT = (
    "hyper_parameters",
    "hparams_name",
    "hparams_type",
    "datamodule_hyper_parameters",
    "datamodule_hparams_name",
    "datamodule_hparams_type",
)
"""A joiner's script has made its own hyperparameters; they may hold objects that are no plain data."""


_SETTINGS: Final = (
    "should_stop",
    "limit_train_batches",
    "limit_val_batches",
    "val_check_interval",
    "val_check_batch",
    "check_val_every_n_epoch",
    "log_every_n_steps",
    "gradient_clip_val",
    "gradient_clip_algorithm",
)
"""Of a trainer."""
WHOLE: Final = "unicron_state"
"""Key of a checkpoint: the rest of the state at a step boundary, encoded. A checkpoint that was written there is
resumed with it, because Lightning would take its counters for those of the end of a step.
"""
BESIDE: Final = "unicron_logged"
"""Key of a checkpoint: what Lightning's own checkpoints leave out, such as values logged in the epoch so far; encoded.
"""


def decode_beside(saved: bytes) -> dict[str, Any]:
    """Return the state in a checkpoint's `BESIDE`; files of earlier versions have only the values logged."""
    found = codec.decode(saved)
    state: dict[str, Any] = (
        found if isinstance(found, dict) else dict(zip(("results", "metric_states"), found, strict=True))
    )
    return state


def restore_logged(trainer: pl.Trainer, saved: bytes, device: torch.device) -> None:
    """Restore the values logged in a data epoch, if the checkpoint was written within it."""
    if trainer.fit_loop.epoch_loop.batch_progress.current.ready > 0:
        _restore_results(trainer, decode_beside(saved), device)
        trainer._logger_connector._first_loop_iter = False  # otherwise the first logged value resets the others


def _restore_results(trainer: pl.Trainer, state: dict[str, Any], device: torch.device) -> None:
    results = trainer.fit_loop.epoch_loop._results
    assert isinstance(results, RecordingResults)
    results.load_state(state["results"], device, trainer.lightning_module)
    results.at_epoch_start = state.get("epoch_metrics", results.at_epoch_start)
    StepMetrics(trainer.lightning_module).load_states(state["metric_states"])


def parameter_state(trainer: pl.Trainer) -> dict[str, Any]:
    """Return the parts of a joiner's state about single parameters."""
    return {
        "requires_grad": [p.requires_grad for p in trainer.lightning_module.parameters()],
        "groups": [group_names(each, trainer.lightning_module) for each in trainer.optimizers],
        "buffers": unsaved(trainer.lightning_module),
    }


def loop_state(trainer: pl.Trainer, layout: SumsLayout, seed: int, fit: int) -> dict[str, Any]:
    """Return the state of Lightning's loops at a step boundary, for `receive` and `arrive`.

    It must be plain data; see `check`.
    """
    checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    return {
        "checkpoint": {key: value for key, value in checkpoint.items() if key not in _LEFT_OUT},
        "counters": counters(trainer.fit_loop),
        **beside(trainer, checkpoint, layout, seed, fit),
    }


def beside(trainer: pl.Trainer, checkpoint: dict[str, Any], layout: SumsLayout, seed: int, fit: int) -> dict[str, Any]:
    """Return the state of Lightning's loops that a checkpoint of this moment leaves out, except for the counters.

    Within a validation it is that of the training, which Lightning restores after it.
    """
    connector, epoch_loop = trainer._logger_connector, trainer.fit_loop.epoch_loop
    results, validating = epoch_loop._results, trainer.validating
    assert isinstance(results, RecordingResults)
    layers = layer_settings(trainer.lightning_module)
    for name, mode in epoch_loop.val_loop._module_mode.mode.items() if validating else ():
        layers.get(name, {})["training"] = mode
    return {
        "plain": _is_plain(trainer, checkpoint["state_dict"]),
        "results": results.state(),
        "metric_states": StepMetrics(trainer.lightning_module).states(),
        "first_loop_iter": False if validating else connector._first_loop_iter,
        "current_fx": None if validating else connector._current_fx,
        "metrics": [connector._callback_metrics, connector._logged_metrics, connector._progress_bar_metrics],
        "epoch_metrics": results.at_epoch_start,
        "callbacks": callbacks.state(trainer),
        "layers": layers,
        "validates": epoch_loop.val_loop._combined_loader is not None,
        "validation_batches": list(epoch_loop.val_loop._max_batches),
        "reloaded": _reloaded(trainer.fit_loop),
        "versions": versions(trainer.loggers),
        "settings": _settings_of(trainer),
        "layout": layout.state(),
        "random": random_states(),
        "seed": seed,
        "fit": fit,
    }


def fit_results(trainer: pl.Trainer) -> bytes | None:
    """Encode what a script may read from a trainer after a fit, for a worker that leaves the fit out; None if it is no
    plain data.
    """
    results: dict[str, Any] = {"callbacks": call._call_callbacks_state_dict(trainer)}
    results["metrics"] = dict(trainer._logger_connector._callback_metrics)
    module = trainer.lightning_module
    same = getattr(trainer.strategy, "names_all", True)  # otherwise other ranks' modules have other parameters
    requires_grad = [p.requires_grad for p in module.parameters()] if same else []
    results["module"] = [requires_grad, layer_settings(module) if same else {}, callbacks.state(trainer)]
    try:
        return codec.encode({**results, "counters": counters(trainer.fit_loop), "settings": _settings_of(trainer)})
    except codec.NotPlainData as error:
        logger.warning("fit_results_not_recorded error=%s", error)
        return None


def take_fit_results(trainer: pl.Trainer, results: dict[str, Any]) -> None:
    """Take the results of `fit_results`."""
    call._call_callbacks_load_state_dict(trainer, {"callbacks": results["callbacks"]})
    trainer._logger_connector._callback_metrics.update(results["metrics"])
    requires_grad, layers, known = results["module"]
    if requires_grad:
        for parameter, needed in zip(trainer.lightning_module.parameters(), requires_grad, strict=True):
            parameter.requires_grad_(needed)
    set_layers(trainer.lightning_module, layers)
    callbacks.restore(trainer, known)
    set_counters(trainer.fit_loop, results["counters"])
    _set_settings(trainer, results.get("settings", ()))


def note_epoch(trainer: pl.Trainer) -> None:
    """Keep the metrics that hooks have seen at the start of an epoch, at its first step: a joiner's hooks see them."""
    epoch_loop, connector = trainer.fit_loop.epoch_loop, trainer._logger_connector
    if epoch_loop.batch_progress.current.ready == 0:
        results = epoch_loop._results
        assert isinstance(results, RecordingResults)
        metrics = connector._callback_metrics, connector._logged_metrics, connector._progress_bar_metrics
        results.at_epoch_start = [dict(each) for each in metrics]


def share_versions(trainer: pl.Trainer, engine: Engine) -> None:
    """Give all ranks' loggers the versions of rank 0's."""
    operation = Agreement("log_versions", lambda rank: codec.encode(versions(trainer.loggers) if rank == 0 else []))
    adopt_versions(trainer.loggers, codec.decode(unpack_parts(engine.run(operation))[0]))


def warm_up() -> None:
    """Import modules that the first checkpoint needs (0.1 s), while the members continue to train."""
    importlib.import_module("omegaconf")


def resume(trainer: pl.Trainer, path: str, take_beside: Callable[[], bytes | None]) -> dict[str, Any]:
    """Resume from the task's last checkpoint, because no member is left.

    Args:
        trainer: before the hooks of its run's start.
        path: of the checkpoint.
        take_beside: returns `BESIDE` of the checkpoint that was loaded last.

    Returns:
        State for `arrive`, if the checkpoint was written at a step boundary (`WHOLE`); otherwise for `restore_again`.
    """
    logger.warning("task_resumes_from_checkpoint path=%s", path)
    connector = trainer._checkpoint_connector
    given = connector._ckpt_path
    connector.resume_start(path, weights_only=True)  # the path came over the network: no code in the file is run
    connector._ckpt_path = given  # callbacks keep what a user resumes from; this one is replaced as any other
    checkpoint = connector._loaded_checkpoint
    trainer.num_sanity_val_steps = 0
    saved, whole = take_beside(), checkpoint.pop(WHOLE, None)
    rest = codec.decode(whole) if whole is not None else {} if saved is None else decode_beside(saved)
    return resume_from(trainer, {**rest, "checkpoint": checkpoint, "path": path})


def resume_from(trainer: pl.Trainer, state: dict[str, Any]) -> dict[str, Any]:
    """Resume from a joiner's state that a member of an earlier life has left; return the state for `arrive`."""
    step = state["checkpoint"]["global_step"]
    if not trainer.lightning_module.automatic_optimization:  # loggers count batches, and not optimizers' steps
        step = state["checkpoint"]["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]["ready"]
    cut_rows(trainer.loggers, int(step))
    return receive(trainer, state)


def check(trainer: pl.Trainer) -> None:
    """Refuse, before training, state that could not be sent to a joiner later.

    Raises:
        NotPlainData: a callback's, module's or optimizer's state holds objects; the message names the place.
    """
    checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    codec.check({key: value for key, value in checkpoint.items() if key not in _LEFT_OUT})


def receive(trainer: pl.Trainer, state: dict[str, Any]) -> dict[str, Any]:
    """Restore the state for the hooks at the start, with the counters as at the start of the donor's epoch.

    Returns:
        The state for `arrive` or `restore_again`: nothing that the hooks do changes it.
    """
    whole = trainer.strategy.parallelism.whole  # type: ignore[attr-defined]
    parts: dict[str, Any] = {} if whole else {"state_dict": {}, "optimizer_states": [{} for _ in trainer.optimizers]}
    kept = copy.deepcopy({**state, "checkpoint": {**state["checkpoint"], **parts}})
    kept["schedules"] = callbacks.forget_schedules(trainer, state.get("callbacks", {}))
    _restore(trainer, state)
    for optimizer in trainer.optimizers:
        optimizer.add_param_group = partial(_add_group_once, optimizer)  # type: ignore[method-assign]
    shown = trainer._logger_connector
    shown._callback_metrics, shown._logged_metrics, shown._progress_bar_metrics = map(
        dict, state.get("epoch_metrics", ({}, {}, {}))
    )
    adopt_versions(trainer.loggers, state.get("versions", ()))
    _load_data(trainer, state)
    if not is_at_boundary(state):
        connector = trainer._checkpoint_connector
        connector._loaded_checkpoint = state["checkpoint"]
        connector.restore_loops()
        connector._loaded_checkpoint = {}
        trainer.should_stop = any(values.get("should_stop") for values in state.get("settings", ()))
        return kept
    set_counters(trainer.fit_loop, state["counters"])
    epoch: Any = trainer.fit_loop.epoch_progress.current
    epoch.ready = epoch.started = epoch.completed = epoch.processed
    total: Any = trainer.fit_loop.epoch_progress.total
    total.ready = total.started = total.completed = total.processed
    return kept


def is_at_boundary(state: dict[str, Any]) -> bool:
    """Whether a state was taken at a step boundary; otherwise it is that of a checkpoint which a hook has written."""
    return "counters" in state


def _load_data(trainer: pl.Trainer, state: dict[str, Any]) -> None:
    """Load the data of validations if the members have, and all data that they have loaded in another data epoch.

    With ``reload_dataloaders_every_n_epochs`` the script may give other data in each epoch.
    """
    fit_loop = trainer.fit_loop
    epochs: Any = fit_loop.epoch_progress
    begins = epochs.state_dict()
    loads: list[Callable[[], None]] = [fit_loop.setup_data, partial(set_up_validation, trainer)]
    for (loop, name), epoch, load in zip(_reloads(fit_loop), state.get("reloaded", ()), loads, strict=False):
        own = getattr(loop, name)
        if own < 0:  # a new life loads in Lightning's order, where that is in the same epoch
            own = state["checkpoint"]["epoch"] if trainer.reload_dataloaders_every_n_epochs else epoch  # type: ignore[attr-defined]
        if 0 <= epoch != own:
            _set_settings(trainer, state.get("settings", ()))
            epochs.current.completed = epochs.current.processed = epoch
            loop._combined_loader = None
            load()
    epochs.load_state_dict(begins)
    if state.get("validates"):
        set_up_validation(trainer)


def set_up_validation(trainer: pl.Trainer) -> None:
    """Set up the data of validations, as a sanity check does: callbacks read ``trainer.num_val_batches``."""
    stage, trainer.validating = trainer.state.stage, True
    trainer.fit_loop.epoch_loop.val_loop.setup_data()
    trainer.state.stage = stage


def _restore(trainer: pl.Trainer, state: dict[str, Any]) -> None:
    """Restore the checkpoint's contents, and what belongs to the parameters.

    Hooks get a copy: the values that they change on their way, as those of a resume may, are not the members'.
    """
    connector, checkpoint = trainer._checkpoint_connector, state["checkpoint"]
    connector._loaded_checkpoint = given = _structure(checkpoint)
    if state.get("plain"):
        call._call_lightning_module_hook(trainer, "on_load_checkpoint", given)
    else:
        connector.restore_model()
    call._call_callbacks_on_load_checkpoint(trainer, given)
    connector._loaded_checkpoint = checkpoint
    connector.restore_datamodule()
    call._call_callbacks_load_state_dict(trainer, checkpoint)
    if state.get("plain"):
        trainer.strategy.load_model_state_dict(checkpoint, strict=trainer.lightning_module.strict_loading)
    if "groups" in state:
        _regroup(trainer, state["requires_grad"], state["groups"])
    restore_unsaved(trainer.lightning_module, state.get("buffers", {}))
    connector.restore_precision_plugin_state()
    connector.restore_optimizers_and_schedulers()
    connector._loaded_checkpoint = {}  # Lightning's later restore_training_state finds nothing left to do


def _is_plain(trainer: pl.Trainer, saved: dict[str, Any]) -> bool:
    """Whether a checkpoint's ``state_dict`` is the module's, which no hook has changed into another form."""
    own = trainer.strategy.lightning_module_state_dict()
    return own.keys() == saved.keys() and all(
        value is own[name] or (isinstance(value, torch.Tensor) and value.data_ptr() == own[name].data_ptr())
        for name, value in saved.items()
    )


def _structure(value: Any) -> Any:
    """Copy containers, and no tensor in them."""
    if isinstance(value, dict):
        made = copy.copy(value)
        made.update((key, _structure(each)) for key, each in value.items())
        return made
    return [_structure(each) for each in value] if isinstance(value, list) else value


def arrive(trainer: pl.Trainer, state: dict[str, Any], layout: SumsLayout, device: torch.device) -> None:
    """Restore the whole state, when the joiner's loop is about to hand out its first batch."""
    restore_again(trainer, state, layout, device)
    fit_loop = trainer.fit_loop
    set_counters(fit_loop, state["counters"])
    fetcher = fit_loop._data_fetcher
    assert fetcher is not None
    fetcher.fetched = fit_loop.epoch_loop.batch_progress.current.ready
    if not state.get("validates", True):  # Lightning has set up what the members' run, begun in an earlier epoch, lacks
        val_loop = fit_loop.epoch_loop.val_loop
        # The numbers of an earlier fit's batches stay until the first validation of this one.
        val_loop._combined_loader, val_loop._max_batches = None, state.get("validation_batches", [])


def restore_again(trainer: pl.Trainer, state: dict[str, Any], layout: SumsLayout, device: torch.device) -> None:
    """Restore all of a state of `receive` but the counters, after the hooks that may have changed it."""
    for optimizer in trainer.optimizers:
        vars(optimizer).pop("add_param_group", None)
    callbacks.catch_up(trainer, state.get("callbacks", {}), state["schedules"])
    _restore(trainer, state)
    if "results" in state:
        _restore_results(trainer, state, device)
    if "metrics" in state:
        connector = trainer._logger_connector
        connector._first_loop_iter, connector._current_fx = state["first_loop_iter"], state["current_fx"]
        connector._callback_metrics, connector._logged_metrics, connector._progress_bar_metrics = state["metrics"]
    callbacks.restore(trainer, state.get("callbacks", {}))
    if not is_at_boundary(state):
        callbacks.note_saved(trainer, state["path"], state.get("kept", ()))
    set_layers(trainer.lightning_module, state.get("layers", {}))
    _set_settings(trainer, state.get("settings", ()))
    if "layout" in state:
        layout.load_state(state["layout"])
        restore_random_states(state["random"])


def _settings(trainer: pl.Trainer) -> list[tuple[Any, Sequence[str]]]:
    """Return the objects whose settings hooks may change while a run trains, and the names of these."""
    fit_loop = trainer.fit_loop
    return [
        (trainer, _SETTINGS),
        (fit_loop, ("min_epochs", "max_epochs")),
        (fit_loop.epoch_loop, ("min_steps", "max_steps")),
    ]


def _settings_of(trainer: pl.Trainer) -> list[dict[str, Any]]:
    """Return the settings; a trainer that validates by the clock lacks one of them."""
    return [
        {name: getattr(owner, name) for name in names if hasattr(owner, name)} for owner, names in _settings(trainer)
    ]


def _set_settings(trainer: pl.Trainer, known: Sequence[dict[str, Any]]) -> None:
    """Set what `_settings_of` gave on a member."""
    for (owner, _), values in zip(_settings(trainer), known, strict=False):
        for name, value in values.items():
            now = getattr(owner, name, None)
            setattr(owner, name, type(now)(value) if isinstance(now, Enum) and value is not None else value)


def counters(fit_loop: _FitLoop) -> dict[str, Any]:
    """Return all of Lightning's training counters."""
    epoch_loop = fit_loop.epoch_loop
    return {
        "epoch": fit_loop.epoch_progress.state_dict(),
        "batch": epoch_loop.batch_progress.state_dict(),
        "scheduler": epoch_loop.scheduler_progress.state_dict(),
        "optimizer": epoch_loop.automatic_optimization.optim_progress.state_dict(),
        "manual": epoch_loop.manual_optimization.optim_step_progress.state_dict(),
        "validation": epoch_loop.val_loop.batch_progress.state_dict(),
        "stepped": epoch_loop._batches_that_stepped,
        "validated": dict(epoch_loop.val_loop._seen_batches_per_dataloader),
        "reloaded": _reloaded(fit_loop),
    }


def set_counters(fit_loop: _FitLoop, saved: dict[str, Any]) -> None:
    """Restore the counters of `counters`."""
    epoch_loop = fit_loop.epoch_loop
    fit_loop.epoch_progress.load_state_dict(saved["epoch"])
    epoch_loop.batch_progress.load_state_dict(saved["batch"])
    epoch_loop.scheduler_progress.load_state_dict(saved["scheduler"])
    epoch_loop.automatic_optimization.optim_progress.load_state_dict(saved["optimizer"])
    if "manual" in saved:  # not in checkpoints of earlier versions
        epoch_loop.manual_optimization.optim_step_progress.load_state_dict(saved["manual"])
    epoch_loop.val_loop.batch_progress.load_state_dict(saved["validation"])
    epoch_loop._batches_that_stepped = saved["stepped"]
    epoch_loop.val_loop._seen_batches_per_dataloader.update(saved.get("validated", {}))
    for (loop, name), epoch in zip(_reloads(fit_loop), saved.get("reloaded", ()), strict=False):
        setattr(loop, name, epoch if epoch >= 0 else float("-inf"))


def _reloaded(fit_loop: _FitLoop) -> list[Any]:
    """Return the epochs of `_reloads`; -1 for data that were not loaded."""
    return [max(-1, getattr(loop, name)) for loop, name in _reloads(fit_loop)]


def _reloads(fit_loop: _FitLoop) -> list[tuple[Any, str]]:
    """Where Lightning keeps the epochs in which training and validation data were loaded."""
    val_loop = fit_loop.epoch_loop.val_loop
    return [(fit_loop, "_last_train_dl_reload_epoch"), (val_loop, "_last_val_dl_reload_epoch")]


def _regroup(trainer: pl.Trainer, requires_grad: list[bool], groups: list[list[list[str]]]) -> None:
    """Freeze and unfreeze parameters, and form the optimizers' groups, as callbacks have done on the donor."""
    for parameter, needed in zip(trainer.lightning_module.parameters(), requires_grad, strict=True):
        parameter.requires_grad_(needed)
    for optimizer, named in zip(trainer.optimizers, groups, strict=True):
        regroup(optimizer, trainer.lightning_module, named)


def _add_group_once(optimizer: Optimizer, group: dict[str, Any]) -> None:
    """Add a parameter group, unless it is there: the members' hook has added it, and that of a joiner does so, too."""
    given = group["params"]
    parameters = [given] if isinstance(given, torch.Tensor) else list(given)
    known = {id(parameter) for each in optimizer.param_groups for parameter in each["params"]}
    if not any(id(parameter) in known for parameter in parameters):
        type(optimizer).add_param_group(optimizer, {**group, "params": parameters})


def leave_finished_epoch(loop: _FitLoop) -> None:
    """Reset the counters of a data epoch that a checkpoint's step has ended, as Lightning does, and begin the next one.

    Lightning finds that a data epoch is over by comparing its steps with their number, after the next data epoch has
    begun. A stream has no such number, and with a schedule it is that of the next data epoch.

    Args:
        loop: has been reset for a run, and has counted the data epoch.
    """
    epoch_loop = loop.epoch_loop
    if not _has_counted_epoch(loop):
        return
    epoch_loop._batches_that_stepped += 1
    epoch_loop.batch_progress.increment_completed()
    _reset_counters(epoch_loop)
    epoch_loop._restart_stage = RestartStage.RESTARTED_ON_LAST  # so that Lightning does not count the step again


def run_from_checkpoint(trainer: pl.Trainer, restore: Callable[[], None]) -> None:
    """Have the loop of a fit continue where the task's own checkpoint was written, with all that followed there.

    Args:
        trainer: has restored the loops.
        restore: restores the state again, after the hooks that may have changed it.
    """
    trainer.fit_loop.run = partial(_run, trainer, restore)  # type: ignore[method-assign]


def _run(trainer: pl.Trainer, restore: Callable[[], None]) -> None:
    """Run a fit as Lightning does, but from where its checkpoint was written."""
    loop = trainer.fit_loop
    epochs: Any = loop.epoch_progress.total
    vars(loop).pop("run", None)
    loop.setup_data()
    if trainer.limit_train_batches == 0 or loop.max_batches == 0:
        restore()
        return
    if epochs.completed == epochs.ready and loop.done:  # the hooks of the end were being called
        for name in ("on_train_start", "on_train_end"):
            call._call_callback_hooks(trainer, name)
            call._call_lightning_module_hook(trainer, name)
        restore()
        return
    loop.reset()
    loop.on_run_start()
    restore()
    in_epoch = loop.restarted_mid_epoch
    _continue(trainer, loop)
    while in_epoch or not loop.done:
        in_epoch = False
        try:
            loop.on_advance_start()
            loop.advance()
            loop.on_advance_end()
        except StopIteration:
            break
        finally:
            loop.on_iteration_done()
    loop.epoch_loop.restarting = False  # a fit that had been stopped has no iteration, in which Lightning does it
    loop.epoch_loop.on_iteration_done()
    loop.on_run_end()


def _continue(trainer: pl.Trainer, loop: _FitLoop) -> None:
    """Do what Lightning leaves out between the hook that has written the checkpoint and the next step or data epoch."""
    epoch_loop = loop.epoch_loop
    if loop.resumed_on_epoch_end or loop.restarted_on_epoch_end:
        _finish_epoch(trainer, loop)
    elif loop.restarted_on_epoch_start:
        loop.epoch_progress.current.ready += 1
        _reset_counters(epoch_loop)
        epoch_loop.restarting = False
    elif loop.restarted_mid_epoch and (epoch_loop.restarted_on_train_batch_end or epoch_loop.restarted_on_last):
        _finish_step(trainer, loop)
    loop._restarting = False  # of this loop alone: schedules of data epochs that follow a metric are not left out


def _finish_step(trainer: pl.Trainer, loop: _FitLoop) -> None:
    """Finish an iteration after ``on_train_batch_end``, or after the validation that follows it."""
    epoch_loop, fetcher = loop.epoch_loop, loop._data_fetcher
    epochs: tuple[Any, Any] = loop.epoch_progress.total, loop.epoch_progress.current
    assert fetcher is not None
    validates = epoch_loop.restarted_on_train_batch_end
    if validates:
        if _has_counted_epoch(loop):
            for progress in epochs:
                progress.processed -= 1
                progress.completed -= 1
        trainer._logger_connector.on_batch_end()
        epoch_loop.batch_progress.increment_completed()
        trainer._logger_connector.update_train_step_metrics()
        epoch_loop._restart_stage = RestartStage.RESTARTED_ON_LAST  # so that Lightning does not count the step again
    if not epoch_loop._should_check_val_fx(fetcher):
        epoch_loop.on_advance_end(fetcher)
    elif validates:
        epoch_loop.val_loop.batch_progress.reset_on_run()
        epoch_loop.val_loop._restart_stage = evaluation_loop.RestartStage.RESTARTED_MID_EVALUATION  # so that it runs


def _finish_epoch(trainer: pl.Trainer, loop: _FitLoop) -> None:
    """Finish a data epoch after ``on_train_epoch_end``."""
    epoch_loop, epochs, connector = loop.epoch_loop, loop.epoch_progress, trainer._logger_connector
    if loop.resumed_on_epoch_end:  # Lightning has counted it
        epochs.total.completed -= 1
        epochs.current.completed -= 1
    connector.epoch_end_reached()
    connector.on_epoch_end()
    if epoch_loop._num_ready_batches_reached():
        epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
    epoch_loop._batches_that_stepped -= 1
    connector.update_train_epoch_metrics()
    epoch_loop._batches_that_stepped += 1
    epochs.increment_completed()
    _Loop.restarting.fset(loop, False)  # type: ignore[attr-defined]
    loop.reset_restart_stage()


def _has_counted_epoch(loop: _FitLoop) -> bool:
    """Whether Lightning has counted a data epoch as processed of which the last step was done, and nothing after it."""
    epoch_loop = loop.epoch_loop
    ended = epoch_loop.restarted_on_train_batch_end and epoch_loop.batch_progress.is_last_batch
    return bool(ended and loop.restarted_mid_epoch)


def _reset_counters(epoch_loop: _TrainingEpochLoop) -> None:
    """Reset the counters of a data epoch that has ended."""
    epoch_loop.batch_progress.reset_on_run()
    epoch_loop.scheduler_progress.reset_on_run()
    epoch_loop.automatic_optimization.optim_progress.reset_on_run()
    epoch_loop.val_loop.batch_progress.total.reset()
