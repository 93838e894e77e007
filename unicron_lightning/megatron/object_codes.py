"""Codes on the objects that ranks exchange as pickles: an object without the epoch's code is not unpickled.

megatron-core and torch's distributed checkpoint exchange their plans by torch's object collectives (``gather_object``,
``scatter_object_list``, ...). All of these encode and decode objects by two functions of one module. `authenticated`
replaces both: each pickle is followed by an HMAC-SHA256 under a key that is derived from the epoch's, which only the
members of the epoch have. A process that takes the place of a rank, or changes the traffic, can have an exchange fail
or repeat an object of this epoch, but nothing else is unpickled. For torch 2.11 to 2.13.
"""

from __future__ import annotations

import hashlib
import hmac
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.distributed import distributed_c10d

from unicron_lightning.worker.communication.communicator import CommunicatorAborted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

_CODE_BYTES: Final = hashlib.sha256().digest_size


class UnprovenObject(CommunicatorAborted):
    """An object of another rank did not carry the epoch's code; nothing of it was unpickled."""


@contextmanager
def authenticated(epoch_key: str) -> Iterator[None]:
    """Add and check codes in all object collectives of this process.

    Args:
        epoch_key: `wire.Epoch.key` of the epoch in which all ranks do this.
    """
    key = hmac.digest(epoch_key.encode(), b"objects", "sha256")
    module: Any = distributed_c10d
    encode, decode = module._object_to_tensor, module._tensor_to_object

    def with_code(obj: Any, device: Any, group: Any) -> tuple[Tensor, Tensor]:
        data, _ = encode(obj, device, group)
        code = hmac.digest(key, data.cpu().numpy().tobytes(), "sha256")
        whole = torch.cat([data, torch.frombuffer(bytearray(code), dtype=torch.uint8).to(data.device)])
        return whole, torch.tensor([whole.numel()], device=data.device)

    def checked(tensor: Tensor, size: Any, group: Any) -> Any:
        whole = tensor.cpu().numpy().tobytes()[: int(size)]
        data, code = whole[:-_CODE_BYTES], whole[-_CODE_BYTES:]
        if not hmac.compare_digest(code, hmac.digest(key, data, "sha256")):
            raise UnprovenObject(f"an object of {len(whole)} bytes from another rank has no valid code of this epoch")
        return decode(torch.frombuffer(bytearray(data), dtype=torch.uint8), len(data), group)

    module._object_to_tensor, module._tensor_to_object = with_code, checked
    try:
        yield
    finally:
        module._object_to_tensor, module._tensor_to_object = encode, decode
