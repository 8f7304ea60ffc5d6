"""Bits of values without an encoding: of activations, and of weights by their names."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Self

from buildlib.errors import InvalidOptionError
from buildlib.quantize.options import QuantizationOptions

_HEAD_BITS = 8
INPUT_STEP = 32
"""Must divide the inputs of a weight in blocks: HTP computes wrong numbers (seen with QNN 2.51)."""
_FATAL_BLOCK, _TILE, _FEW = 64, 384, 5
_LPBQ_BITS = 4
_PREFIX = "quantization."
BLOCK_KEY = f"{_PREFIX}lpbq_block_size"
_MIXED_KEY = f"{_PREFIX}mixed_precision"
_ACTIVATION_KEY = f"{_PREFIX}activation_precision"
_ALLOWED_BITS = {
    "act_bitwidth": (8, 16),
    "bias_bitwidth": (32,),
    "param_bitwidth": (4, 8),
    "kv_bitwidth": (8, 16, None),
}


def kills_emulator(inputs: int, block_size: int) -> bool:
    """Return whether the HTP emulator dies of a weight in blocks, with signal 11.

    Of QNN 2.51 it does where blocks of 64 are dealt evenly to tiles of up to 384 inputs, and one of
    several tiles gets fewer than 5: at 448, 512, 576, 832, 896 and 1216 inputs. So it did at all 36
    widths from 128 to 3072 that were tried, whatever the outputs and tokens; blocks of 32, 96, 128
    and 224 ran.
    """
    tiles = -(-inputs // _TILE)
    return block_size == _FATAL_BLOCK and tiles > 1 and inputs // block_size // tiles < _FEW


@dataclass(frozen=True)
class WeightFormat:
    """Bits of a weight; 4 can have a scale for each block of inputs (LPBQ)."""

    bits: int
    block_size: int | None = None


@dataclass(frozen=True)
class Bitwidths:
    """Bits of values without an encoding.

    Tables and norms have those of activations. Biases have 32: the QNN
    provider of ONNX Runtime compiles no others. The output projection always has 8: its errors go
    straight into the logits.

    Attributes:
        kv_bitwidth: of keys and values; None: `choose_cache_bits` decides.
        lpbq_block_size: weights of 4 bits get a scale for each block of this many inputs; None: one
            for each output channel.
        blocks_where_they_fit: a weight whose inputs are no whole blocks gets a scale for each
            output channel; otherwise it is refused.
        mixed_precision: `PATTERN=BITS` of weights by name, where `*` stands for any characters; the
            last that matches decides.
        activation_precision: the same of activations; values that share a grid have the bits of the
            first of them, by name, that a pattern matches.
        input_step: must divide the inputs of weights in blocks, as the compiler from PyPI needs it;
            1 for mllm's, which is not held to the emulator either.
    """

    act_bitwidth: int = 16
    bias_bitwidth: int = 32
    param_bitwidth: int = 8
    kv_bitwidth: int | None = None
    lpbq_block_size: int | None = None
    blocks_where_they_fit: bool = False
    mixed_precision: tuple[str, ...] = ()
    activation_precision: tuple[str, ...] = ()
    input_step: int = INPUT_STEP

    @classmethod
    def from_options(cls, options: QuantizationOptions) -> Self:
        """Take the bits from a builder's options."""
        names = {field.name for field in fields(cls)} - {"input_step"}
        return cls(**{name: getattr(options, name) for name in names})

    def __post_init__(self) -> None:
        for key, allowed_bits in _ALLOWED_BITS.items():
            if getattr(self, key) not in allowed_bits:
                reason = f"{getattr(self, key)} bits cannot be built"
                raise InvalidOptionError(
                    _PREFIX + key, reason, tuple(map(str, filter(None, allowed_bits)))
                )
        patterns = self._patterns()
        self._activation_patterns()
        four = _LPBQ_BITS in {self.param_bitwidth, *(bits for _, bits in patterns)}
        required = self.lpbq_block_size is not None and not self.blocks_where_they_fit
        if required and not four:
            reason = f"LPBQ is of 4 bits, and {_PREFIX}param_bitwidth is {self.param_bitwidth}"
            raise InvalidOptionError(BLOCK_KEY, reason, ())

    def weight_format(self, name: str, *, head: bool = False) -> WeightFormat:
        """Return the format of the weight of a matrix, whatever its shape."""
        bits = _HEAD_BITS if head else self.param_bitwidth
        for pattern, pattern_bits in self._patterns():
            if fnmatchcase(name, pattern):
                bits = pattern_bits
        return WeightFormat(bits, self.lpbq_block_size if bits == _LPBQ_BITS else None)

    def activation_bits(self, names: Collection[str]) -> int:
        """Return the bits of activations that share a grid, by their names."""
        bits = {
            name: pattern_bits
            for pattern, pattern_bits in self._activation_patterns()
            for name in names
            if fnmatchcase(name, pattern)
        }
        return bits[min(bits)] if bits else self.act_bitwidth

    def check_patterns(
        self, weights: Collection[str], activations: Collection[str] | None = None
    ) -> None:
        """Refuse a pattern that matches nothing, with some names that a pattern can match.

        Args:
            weights: names of all weights of matrices.
            activations: names of all activations but keys and values; None checks weights alone.
        """
        checked: tuple[tuple[str, str, list[tuple[str, int]], Collection[str] | None], ...] = (
            (_MIXED_KEY, "weight", self._patterns(), weights),
            (_ACTIVATION_KEY, "activation", self._activation_patterns(), activations),
        )
        for key, kind, patterns, names in checked:
            for pattern, _ in patterns:
                if names is not None and not any(fnmatchcase(name, pattern) for name in names):
                    reason = f"no {kind} of this model has a name like {pattern!r}"
                    raise InvalidOptionError(key, reason, _some_kinds(names))

    def _patterns(self) -> list[tuple[str, int]]:
        return _parse(_MIXED_KEY, self.mixed_precision, (4, 8), "*.down_proj.*=8")

    def _activation_patterns(self) -> list[tuple[str, int]]:
        return _parse(_ACTIVATION_KEY, self.activation_precision, (8, 16), "layer_*_output=16")


def _parse(
    key: str, texts: Iterable[str], known: tuple[int, int], example: str
) -> list[tuple[str, int]]:
    patterns = []
    for text in texts:
        pattern, _, bits = text.rpartition("=")
        if not pattern or bits not in map(str, known):
            numbers = " or ".join(map(str, known))
            reason = f"{text!r} is not PATTERN=BITS with {numbers} bits, such as {example}"
            raise InvalidOptionError(key, reason, ())
        patterns.append((pattern, int(bits)))
    return patterns


def _some_kinds(names: Iterable[str]) -> tuple[str, ...]:
    """Return names that differ in more than the number of their layer, at most eight."""
    kinds = {"".join(c for c in name if not c.isdigit()): name for name in sorted(names)}
    return tuple(sorted(kinds.values())[:8])
