"""A target that is sharded over several processes: transformers' tensor parallelism, under torchrun.

Every process runs the same loop over its shard of every layer. Logits are equal in all processes, and so are the random
numbers, which follow from seed and position. So the processes only need the same requests.
"""

from __future__ import annotations

import atexit
import os
import time
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from paceline.common.errors import InputError, UnsupportedError

if TYPE_CHECKING:
    from paceline.models.language_model import LanguageModel

T = TypeVar("T")

_LETS_GO = 1.0  # seconds for other threads to finish; each of them needs a core for a moment


def check_plan(plan: str | None) -> None:
    """Refuse a plan in a single process."""
    if plan is None:
        return
    if plan != "auto":
        raise InputError(f"tp_plan must be 'auto', the plan that a model brings along, got {plan!r}.")
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        raise InputError(
            "tp_plan shares a model out over processes, and there is one; start with `torchrun --nproc-per-node 2 …`."
        )


def leave_in_order() -> None:
    """Close the connections of the processes while Python still runs.

    A thread of gloo releases the tensors of a collective after the collective is done, and needs Python's lock for it.
    If Python ends first, the thread is stopped inside a C++ destructor, which aborts the process. torch does not wait
    for it while a group is referenced (a sharded model references its own), so this function waits.
    """
    atexit.unregister(_leave)  # so that it runs once
    atexit.register(_leave)


def _leave() -> None:
    if torch.distributed.is_initialized():
        if torch.distributed.get_backend() != "nccl":
            time.sleep(_LETS_GO)
        torch.distributed.destroy_process_group()


def is_sharded(lm: LanguageModel) -> bool:
    """Return True if this process holds only a shard of the model."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    from torch.distributed.tensor import DTensor

    model: Any = getattr(lm, "model", None)
    return model is not None and any(isinstance(weight, DTensor) for weight in model.parameters())


def refuse_pieces(lm: LanguageModel, what: str) -> None:
    """Refuse a sharded model, for code that reads its weights. what: the consequence, for the message."""
    if is_sharded(lm):
        raise UnsupportedError(f"{lm.name} is shared out over processes (tp_plan), so {what}; load it in one process.")


def of_the_first(value: T) -> T:
    """Return the value of the first process, in all processes."""
    box = [value]
    torch.distributed.broadcast_object_list(box, src=0)
    return box[0]


def check_alike(value: Any, what: str) -> None:
    """Refuse different values in different processes, which would wait for each other for ever."""
    everywhere: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everywhere, value)
    if any(other != everywhere[0] for other in everywhere):
        raise InputError(
            f"The processes of a shared-out target were given different {what}; give all of them the same."
        )
