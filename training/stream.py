"""Write large files of tensors one tensor at a time, so that never all of them are in memory.

Each file is laid out first, with its size and the place of every tensor. The tensors then follow in
any order. The files are those that safetensors and torch.save would write.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.serialization import skip_data


def put(file: BinaryIO, at: int, x: Tensor) -> None:
    """Write the numbers of a tensor to a file, from byte `at` on."""
    file.seek(at)
    file.write(x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())


def save_safetensors(
    file: BinaryIO, shapes: dict[str, torch.Size], tensors: Iterable[tuple[str, Tensor]]
) -> None:
    """Write a .safetensors file of fp32 tensors: https://huggingface.co/docs/safetensors.

    shapes: of all tensors, by name.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    starts = {}
    for name in sorted(shapes):
        starts[name] = end
        end += 4 * shapes[name].numel()
        offsets = [starts[name], end]
        header[name] = {"dtype": "F32", "shape": list(shapes[name]), "data_offsets": offsets}
    content = json.dumps(header, separators=(",", ":")).encode()
    content += b" " * (-len(content) % 8)  # the tensors begin at a multiple of 8
    file.write(len(content).to_bytes(8, "little") + content)
    begin = file.tell()
    file.truncate(begin + end)
    for name, x in tensors:
        assert x.dtype == torch.float32 and x.shape == shapes[name], name
        put(file, begin + starts[name], x)


def save_state(file: BinaryIO, state: Any, tensors: Iterable[Tensor]) -> None:
    """Write what torch.save(state, file) would write: dicts and lists of numbers and tensors.

    Of the tensors in `state` only the shapes count. `tensors` yields them in the order of
    tensors_in(state). file: is open to be read, too.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # takes a while to import

    fakes = FakeTensorMode()

    def fake(x: Any) -> Any:
        if isinstance(x, Tensor):
            with fakes:
                return torch.empty(x.shape, dtype=x.dtype)
        if isinstance(x, dict):
            return {k: fake(v) for k, v in x.items()}
        return [fake(v) for v in x] if isinstance(x, list) else x

    with skip_data(materialize_fake_tensors=True):
        save(fake(state), file)  # with room for the numbers of each tensor
    file.seek(0)
    with FakeTensorMode():
        laid_out = torch.load(file, weights_only=True)
    for place, x in zip(tensors_in(laid_out), tensors, strict=True):
        put(file, place.untyped_storage()._checkpoint_offset, x)


def save(state: Any, file: BinaryIO) -> None:
    """Call torch.save(state, file). Raises OSError if the file cannot be written."""
    try:
        torch.save(state, file)
    except RuntimeError as e:  # on top of the reason
        raise e.__context__ if isinstance(e.__context__, OSError) else e from None


def tensors_in(state: Any) -> Iterator[Tensor]:
    """Yield the tensors in any nesting of dicts and lists, in their order."""
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, dict | list):
        for value in state.values() if isinstance(state, dict) else state:
            yield from tensors_in(value)
