"""One micro-batch's ``training_step`` in manual optimization, in a thread that runs from one backward to the next.

Threads only keep the calls in progress: exactly one of them, or the training thread, runs at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from unicron_lightning.strategies.metrics.recording import Recording
from unicron_lightning.worker.control.activity import Activity


@dataclass(frozen=True, kw_only=True)
class MeetingPlace:
    """The place up to which all micro-batches of a step must come before any continues.

    Attributes:
        mask: which of the module's parameters need a gradient in this backward; None: the end of ``training_step``.
    """

    mask: tuple[bool, ...] | None


END = MeetingPlace(mask=None)


@dataclass
class StrandState:
    """State of the module and of the process as one strand sees it, while another strand has its own in place."""

    gradients: list[Tensor | None]
    needed: list[bool]
    """Which parameters need gradients."""
    toggled: Any
    """Lightning's record of `toggle_optimizer`."""
    training: list[bool]
    """Mode of each submodule."""
    dtype: torch.dtype
    """torch's default."""
    random: dict[str, object] = field(default_factory=dict)
    effects: Any = None


class Strand:
    """A call of ``training_step`` that stops before and after each backward.

    Args:
        number: of the micro-batch.
        call: runs the step on the strand's thread.
        activity: record of the thread that works.
        device: of the model.
        recording: what `RecordingResults.exchange` puts in place for it.

    Attributes:
        meeting: number of backwards behind it.
        steps: number of optimizer steps behind it.
        schedules: number of steps of learning rate schedulers behind it.
        at: the meeting at which it stands; None while it runs, and before its start.
        computes: whether its next backward counts. Otherwise it is left out.
        loss: of its first backward, detached.
        output: of ``training_step``, once it has ended.
        state: while another strand is in place.
    """

    def __init__(
        self, number: int, call: Callable[[], Any], activity: Activity, device: torch.device, recording: Recording
    ) -> None:
        self.number = number
        self.recording = recording
        self.meeting = self.steps = self.schedules = 0
        self.at: MeetingPlace | None = None
        self.computes = True
        self.loss: Tensor | None = None
        self.output: Any = None
        self.state: StrandState | None = None
        self._call = call
        self._activity = activity
        self._device = device
        self._error: BaseException | None = None
        self._closing = False
        self._continue, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._thread: threading.Thread | None = None

    def advance(self) -> MeetingPlace | None:
        """Run up to the next stop, on the strand's thread, and return `at`.

        Raises:
            BaseException: the error of the module's code.
        """
        self.at = None
        before = self._activity.thread
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"micro-batch {self.number}", daemon=True)
            self._thread.start()
        else:
            self._continue.release()
        try:
            self._stopped.acquire()
        finally:
            self._activity.thread = before
        if self._error is not None:
            raise self._error
        return self.at

    def stop(self, at: MeetingPlace | None) -> None:
        """Let the training thread continue until it calls `advance`; on the strand's thread."""
        self.at = at
        self._stopped.release()
        self._continue.acquire()
        if self._closing:
            raise GeneratorExit
        self._activity.thread = threading.get_native_id()

    def close(self) -> None:
        """End the thread, in the middle of the step if need be."""
        if self._thread is None:
            return
        if self._thread.is_alive():
            self._closing = True
            self._continue.release()
        self._thread.join(10.0)

    def _run(self) -> None:
        self._activity.thread = threading.get_native_id()
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        try:
            self.output = self._call()
            self.at = END
        except GeneratorExit:
            return
        except BaseException as error:  # noqa: BLE001 - raised again on the training thread
            self._error = error
        self._stopped.release()


class StrandStates:
    """Puts the state of one strand in place of another's.

    Args:
        parameters: all of the module's.
        modules: all of its submodules.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], modules: Sequence[torch.nn.Module]) -> None:
        self._parameters = parameters
        self._modules = modules

    def take(self, module: Any) -> StrandState:
        """Return the state in place: gradients, flags and modes."""
        return StrandState(
            gradients=[parameter.grad for parameter in self._parameters],
            needed=[parameter.requires_grad for parameter in self._parameters],
            toggled=module._param_requires_grad_state,
            training=[each.training for each in self._modules],
            dtype=torch.get_default_dtype(),
        )

    def put(self, module: Any, state: StrandState) -> None:
        """Put a state in place."""
        for parameter, gradient, needed in zip(self._parameters, state.gradients, state.needed, strict=True):
            if parameter.grad is not gradient:
                parameter.grad = gradient
            if parameter.requires_grad is not needed:
                parameter.requires_grad_(needed)
        module._param_requires_grad_state = state.toggled
        torch.set_default_dtype(state.dtype)
        for each, training in zip(self._modules, state.training, strict=True):
            each.training = training
