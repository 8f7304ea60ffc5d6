"""Anybody's ONNX of a text encoder in the form that Genie and the quantizer take.

Exports differ in the types, lengths and number of inputs, and in the names of outputs. The result
has one length, int32 inputs, and no values that integers cannot hold: a mask is looked up in a
table of two floats, and its minus infinity is -100.
"""

import math
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

from buildlib.error_base import one_line
from buildlib.errors import ModelFileError
from buildlib.graph.builder import IR_VERSION, OPSET
from buildlib.graph.files import load_model, save_model, tensor_array
from buildlib.graph.folding import Refusal, fold
from buildlib.graph.values import infer_shapes, remove_unused, tensor_value
from buildlib.numerics.runners import OnnxRunner
from buildlib.quantize.grids import LAYOUT_OPS
from plugins.encoders import interface
from plugins.encoders.inputs import cosine, embed_in_float, padded_inputs

_MINUS_INFINITY, _MASKED = -1e4, -100.0
_TYPES = 2
_SMALLEST_SQUARE = 1e-12
_SAME = 0.999
_SQRT_TWO = math.sqrt(2.0)
_FUSIONS = ("MatMulAddFusion",)
"""Of the runtime, whose names are in the way when the model is opened again."""


def import_encoder(
    model_path: Path,
    out_path: Path,
    length: int,
    pooling: interface.Pooling = interface.Pooling(),  # noqa: B008  (frozen)
) -> Path:
    """Write an encoder's ONNX for texts of `length` tokens; shorter ones are padded.

    Args:
        model_path: from any exporter, with static or dynamic lengths.
        out_path: the model, with weights inside.
        length: tokens of the longest text.
        pooling: how tokens become one vector where the model does not say.
    """
    model = ir.from_proto(_static(model_path, length))
    work = _Importer(model, model_path, length)
    work.place_by_count()
    work.select_by_mask()
    work.lookup_mask()
    work.take_int32()
    work.place_by_input()
    work.add_missing_inputs()
    work.bound_mask()
    work.fuse_gelu()
    work.name_outputs(pooling)
    remove_unused(model.graph)
    model.graph.sort()
    try:
        infer_shapes(model)
    except onnx.shape_inference.InferenceError as error:
        raise ModelFileError(model_path, one_line(str(error), 200)) from error
    save_model(model, out_path)
    _compare(model_path, out_path, length, pooling)
    return out_path


def _compare(export: Path, imported: Path, length: int, pooling: interface.Pooling) -> None:
    """Check that texts of several lengths have the embeddings that they had."""
    random = np.random.default_rng(length)
    last = _vocabulary(imported) - 1
    sizes = (length, max(2, length // 3))  # of tokens in the upper half, where padding is not
    texts = [random.integers(last // 2, last, size).tolist() for size in sizes]
    runner = OnnxRunner(imported)
    if interface.POOLED_OUTPUT not in runner.ports.outputs:
        return
    for tokens, expected in zip(texts, embed_in_float(export, texts, pooling), strict=True):
        actual = runner.run(padded_inputs(tokens, length, 0))[interface.POOLED_OUTPUT]
        similarity = cosine(actual, expected)
        if similarity < _SAME:
            raise ModelFileError(
                export,
                f"a text of {len(tokens)} of {length} tokens would have another embedding (cosine "
                f"{similarity:.4f}): Genie puts padding first, so nothing may look at fixed "
                "positions; export last_hidden_state alone, which is pooled here",
            )


def _vocabulary(path: Path) -> int:
    """Return the number of rows that tokens are looked up in."""
    (ids,) = (value for value in load_model(path).graph.inputs if value.name == interface.INPUT_IDS)
    table = next(iter(ids.uses())).node.inputs[0]
    return 2 if table is None or table.shape is None else int(table.shape.numpy()[0])


def _static(path: Path, length: int) -> onnx.ModelProto:
    """Load a model at one length, with everything computed that follows from it."""
    import onnxruntime as ort

    if not interface.is_encoder(load_model(path)):
        raise ModelFileError(path, "it is not a text encoder: input_ids in, hidden states out")
    try:
        model = onnx.load(path)
        for value in model.graph.input:
            dims = value.type.tensor_type.shape.dim
            for dim, size in zip(dims, (1, length), strict=True):
                if dim.HasField("dim_value") and dim.dim_value not in {size, 0}:
                    reason = f"{value.name} has {dim.dim_value} where {size} are asked for"
                    raise ModelFileError(path, f"{reason}: set the context length to it")
                dim.dim_value = size
        del model.graph.value_info[:]
        for output in model.graph.output:
            output.type.tensor_type.ClearField("shape")
        with tempfile.TemporaryDirectory(prefix="qnnfarm-") as folder:
            options = ort.SessionOptions()
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
            options.optimized_model_filepath = str(Path(folder) / "model.onnx")
            options.log_severity_level = 3
            ort.InferenceSession(
                model.SerializeToString(),
                options,
                providers=["CPUExecutionProvider"],
                disabled_optimizers=list(_FUSIONS),
            )
            model = onnx.load(Path(folder) / "model.onnx")
        domains = [each for each in model.opset_import if each.domain in {"", "ai.onnx"}]
        del model.opset_import[:]
        model.opset_import.extend(domains)
        if domains[0].version < OPSET:
            model = onnx.version_converter.convert_version(model, OPSET)
    except ModelFileError:
        raise
    except Exception as error:  # onnx and the runtime raise a dozen kinds
        raise ModelFileError(
            path, f"it cannot be fixed at {length} tokens: {one_line(str(error), 200)}"
        ) from error
    model.ir_version = IR_VERSION
    return model


def _makers(value: ir.Value) -> list[ir.Node]:
    """Return the nodes that a value is made by, from the last to the first."""
    makers: dict[ir.Node, None] = {}
    todo = [value.producer()]
    while todo:
        node = todo.pop()
        if node is not None and node not in makers:
            makers[node] = None
            todo += [part.producer() for part in node.inputs if part is not None]
    return list(makers)


def _read_inputs(value: ir.Value) -> set[ir.Value]:
    parts = {part for node in _makers(value) for part in node.inputs if part is not None}
    return {part for part in parts if part.producer() is None and part.const_value is None}


class _Importer:
    """Edits one graph in place."""

    def __init__(self, model: ir.Model, path: Path, length: int) -> None:
        self.graph = model.graph
        self.path = path
        self.length = length
        self.inputs = {str(value.name): value for value in self.graph.inputs}

    def refuse(self, reason: str) -> ModelFileError:
        return ModelFileError(self.path, reason)

    def constant(self, name: str, values: object, dtype: type = np.float32) -> ir.Value:
        value = tensor_value(ir.Tensor(np.asarray(values, dtype), name=name), name)
        self.graph.register_initializer(value)
        return value

    def node(self, kind: str, inputs: list[ir.Value], name: str, **attributes: object) -> ir.Value:
        output = ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT))
        self.graph.append(
            ir.node(kind, inputs, attributes=attributes, outputs=[output], name=name)  # type: ignore[arg-type]
        )
        return output

    def place_by_count(self) -> None:
        """Look positions up by `position_ids` where they count tokens, as RoBERTa's do.

        Those count on from the number of the padding token, over all that is not padding.
        """
        if interface.POSITION_IDS in self.inputs:
            return
        for node in list(self.graph):
            table, index = node.inputs[:2] if node.op_type == "Gather" else (None, None)
            if table is None or index is None or table.const_value is None:
                continue
            if not any(maker.op_type == "CumSum" for maker in _makers(index)):
                continue
            places = self._computed(index).reshape(-1)
            rows = tensor_array(table.const_value)
            if not np.ptp(places):  # token types, which RoBERTa looks up by positions
                row = self.constant(f"{table.name}_row", rows[places[:1]][None])
                node.outputs[0].replace_all_uses_with(row)
                continue
            if len(places) != self.length or (np.diff(places) != 1).any():
                raise self.refuse("its positions are made from tokens, and not by counting them")
            first = int(places[0])
            if first < 0 or first + self.length > len(rows):
                reason = f"it has positions for {len(rows) - first} tokens"
                raise self.refuse(f"{reason}: set the context length to them at most")
            own = self.constant(f"{table.name}_by_position", rows[first : first + self.length])
            node.replace_input_with(0, own)
            node.replace_input_with(1, self._new_input(interface.POSITION_IDS))
        remove_unused(self.graph)

    def select_by_mask(self) -> None:
        """Look up the values that the mask alone selects, however the exporter spreads it."""
        mask = self.inputs.get(interface.ATTENTION_MASK)
        for node in [node for node in self.graph if node.op_type == "Where"]:
            result = node.outputs[0]
            if mask is None or _read_inputs(result) != {mask}:
                continue
            real = np.arange(self.length) % 2
            numbers = self._computed(result, real)
            table = numbers.reshape(-1)[:2] if numbers.shape[-1:] == real.shape else np.zeros(2)
            for each in (real, 1 - real):
                rows = np.broadcast_to(table[each], numbers.shape)
                if not np.array_equal(self._computed(result, each), rows):
                    raise self._odd_mask(node)
            name, dims = result.name, [1] * (numbers.ndim - 1) + [-1]
            values = self.constant(
                f"{name}_values", np.where(table < _MINUS_INFINITY, _MASKED, table)
            )
            row = self.node("Gather", [values, mask], f"{name}_by_mask", axis=0)
            shape = self.constant(f"{name}_shape", dims, np.int64)
            result.replace_all_uses_with(self.node("Reshape", [row, shape], f"{name}_row"))
        remove_unused(self.graph)

    def _computed(self, value: ir.Value, mask: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]:
        """Compute a value for a text of one token, many times, which is not the padding."""
        if value.const_value is not None:
            return tensor_array(value.const_value)
        node = value.producer()
        if node is None:
            is_mask = value.name == interface.ATTENTION_MASK
            numbers = np.ones(self.length) if mask is None else mask
            words = np.full(self.length, self._vocabulary() // 2)
            return np.array([numbers if is_mask else words], np.int64)
        inputs = [None if part is None else self._computed(part, mask) for part in node.inputs]
        try:
            return fold(node, inputs, OPSET)[node.outputs.index(value)]
        except Refusal as refusal:
            raise self.refuse(f"{node.op_type} ({node.name!s:.60}): {refusal.reason}") from refusal

    def _vocabulary(self) -> int:
        tables = [use.node.inputs[0] for use in self.inputs[interface.INPUT_IDS].uses()]
        constants = [None if table is None else table.const_value for table in tables]
        return max((int(one.shape.numpy()[0]) for one in constants if one is not None), default=2)

    def lookup_mask(self) -> None:
        """Replace casts of the mask by a table of 0 and 1: integers have no grid."""
        mask = self.inputs.get(interface.ATTENTION_MASK)
        if mask is None:
            raise self.refuse("it has no attention_mask, without which padding would be read")
        uses = [use for use in mask.uses() if use.node.op_type != "Gather"]
        if not uses:
            return
        looked_up = self.node(
            "Gather",
            [self.constant("mask_values", [0.0, 1.0]), mask],
            "attention_mask_float",
            axis=0,
        )
        for use in uses:
            use.node.replace_input_with(use.idx, looked_up)
        users = [use.node for use in uses]
        for node in users:
            to = node.attributes.get_int("to", None)
            if node.op_type == "Cast" and to == ir.DataType.FLOAT.value:
                (data,) = node.inputs
                if data is not None:
                    node.outputs[0].replace_all_uses_with(data)
            elif node.op_type in LAYOUT_OPS and node.op_type != "Gather":
                node.outputs[0].dtype = ir.DataType.FLOAT
                users += [use.node for use in node.outputs[0].uses()]
            else:
                raise self._odd_mask(node)

    def _odd_mask(self, node: ir.Node) -> ModelFileError:
        return self.refuse(
            f"its attention_mask goes through {node.op_type} ({str(node.name)[:60]}), which is not "
            "understood: export it with eager attention"
        )

    def take_int32(self) -> None:
        """Give the inputs Genie's type; they may be looked up with, and nothing else."""
        for name, value in self.inputs.items():
            value.dtype = ir.DataType.INT32
            odd = next((use.node for use in value.uses() if use.node.op_type != "Gather"), None)
            if odd is not None:
                raise self.refuse(
                    f"its {name} goes through {odd.op_type} ({str(odd.name)[:60]}), not a lookup"
                )

    def place_by_input(self) -> None:
        """Look positions up by `position_ids` where they are built in: padding comes first.

        Attention by rotations or distances needs none.
        """
        if interface.POSITION_IDS in self.inputs:
            return
        for node in [node for node in self.graph if node.op_type == "Add"]:
            for index, value in enumerate(node.inputs):
                if value is None or value.const_value is None:
                    continue
                array = tensor_array(value.const_value)
                if array.shape[-2:-1] != (self.length,) or math.prod(array.shape[:-2]) != 1:
                    continue
                ids, name = self._new_input(interface.POSITION_IDS), f"{value.name}_by_position"
                table = self.constant(f"{name}_table", array.reshape(array.shape[-2:]))
                node.replace_input_with(index, self.node("Gather", [table, ids], name, axis=0))

    def _new_input(self, name: str) -> ir.Value:
        if name not in self.inputs:
            kind, shape = ir.TensorType(ir.DataType.INT32), ir.Shape((1, self.length))
            self.inputs[name] = ir.Value(name=name, type=kind, shape=shape)
        return self.inputs[name]

    def add_missing_inputs(self) -> None:
        """Add the inputs that Genie feeds and the model does not have, as lookups of zero."""
        words = next((use.node for use in self.inputs[interface.INPUT_IDS].uses()), None)
        if words is None:
            raise self.refuse("it reads no tokens: nothing is looked up by input_ids")
        embedded = words.outputs[0]
        for name, rows in (
            (interface.TOKEN_TYPE_IDS, _TYPES),
            (interface.POSITION_IDS, self.length),
        ):
            if name in self.inputs:
                continue
            ids = self._new_input(name)
            zeros = self.constant(f"{name}_zeros", np.zeros((rows, 1)))
            zero = self.node("Gather", [zeros, ids], f"{name}_nothing", axis=0)
            uses = list(embedded.uses())
            total = self.node("Add", [embedded, zero], f"{name}_added")
            for use in uses:
                use.node.replace_input_with(use.idx, total)
            embedded = total
        self.graph.inputs[:] = [self.inputs[name] for name in interface.INPUTS]

    def bound_mask(self) -> None:
        """Bound minus infinity: on a grid that reaches so far all other values would be one."""
        for value in self.graph.initializers.values():
            number = self._number([value]) if value.dtype == ir.DataType.FLOAT else None
            if number is not None and number < _MINUS_INFINITY and value.shape is not None:
                value.const_value = ir.Tensor(np.full(value.shape.numpy(), _MASKED, np.float32))

    def fuse_gelu(self) -> None:
        """Replace `x * 0.5 * (1 + erf(x / sqrt(2)))`, in any order, by Gelu."""
        for node in [node for node in self.graph if node.op_type == "Erf"]:
            ends = self._gelu_around(node)
            if ends is None:
                raise self.refuse(
                    f"it has an Erf ({str(node.name)[:60]}) that is no part of a GELU"
                )
            data, end = ends
            output = self.node("Gelu", [data], f"{end.name}_gelu")
            end.replace_all_uses_with(output, replace_graph_outputs=True)

    def _gelu_around(self, erf: ir.Node) -> tuple[ir.Value, ir.Value] | None:
        data = self._scaled_by(erf.inputs[0], 1 / _SQRT_TWO)
        plus = self._only_user(erf.outputs[0], "Add")
        if data is None or plus is None or self._number(plus.inputs) != 1.0:
            return None
        end, factor, has_data = plus.outputs[0], 1.0, False
        while not (has_data and math.isclose(factor, 0.5)):
            product = self._only_user(end, "Mul")
            if product is None:
                return None
            number = self._number(product.inputs)
            if number is not None:
                factor *= number
            else:
                other = next(value for value in product.inputs if value is not end)
                if self._scaled_by(other, 0.5) is data:
                    factor *= 0.5
                elif other is not data:
                    return None
                has_data = True
            end = product.outputs[0]
        return data, end

    def _scaled_by(self, value: ir.Value | None, factor: float) -> ir.Value | None:
        """Return the value that `value` is `factor` times of, or None."""
        node = None if value is None else value.producer()
        number = None if node is None else self._number(node.inputs)
        if node is None or number is None or node.op_type not in {"Mul", "Div"}:
            return None
        actual = number if node.op_type == "Mul" else 1 / number
        if not math.isclose(actual, factor, rel_tol=1e-4):
            return None
        return next(value for value in node.inputs if value is None or value.const_value is None)

    @staticmethod
    def _number(values: Iterable[ir.Value | None]) -> float | None:
        for value in values:
            tensor = None if value is None else value.const_value
            if tensor is not None and tensor.size == 1:
                return float(tensor_array(tensor).reshape(()))
        return None

    @staticmethod
    def _only_user(value: ir.Value, kind: str) -> ir.Node | None:
        users = [use.node for use in value.uses()]
        return users[0] if len(users) == 1 and users[0].op_type == kind else None

    def name_outputs(self, pooling: interface.Pooling) -> None:
        """Name the outputs as Genie does; pool the tokens where the model does not."""
        outputs = {str(value.name): value for value in self.graph.outputs}
        sequence = next((outputs[n] for n in interface.SEQUENCE_NAMES if n in outputs), None)
        pooled = next((outputs[n] for n in interface.POOLED_NAMES if n in outputs), None)
        if sequence is not None:
            sequence.name = interface.SEQUENCE_OUTPUT
            pooled = self._pooled(sequence, pooling.mode) if pooled is None else pooled
        if pooled is not None:
            pooled = self._normalized(pooled) if pooling.normalized else pooled
            pooled.name = interface.POOLED_OUTPUT
        self.graph.outputs[:] = [value for value in (sequence, pooled) if value is not None]

    def _normalized(self, pooled: ir.Value) -> ir.Value:
        """Scale to a length of 1: RMSNorm with a gain of `embed ** -0.5`, one operator of HTP."""
        width = (pooled.shape or (0,))[-1]
        if not isinstance(width, int):
            raise self.refuse(f"the width of its {pooled.name} is not known")
        gain = self.constant("normal_gain", np.full(width, width**-0.5))
        settings = {"axis": -1, "epsilon": _SMALLEST_SQUARE}
        return self.node("RMSNormalization", [pooled, gain], "pool_normal", **settings)

    def _pooled(self, sequence: ir.Value, mode: interface.PoolingMode) -> ir.Value:
        """Pool by a product with weights whose sum is 1: a softmax of the mask, or the first token.

        Padding comes first, so the first token is where its position is 0.
        """
        mask = self.inputs[interface.ATTENTION_MASK]
        shape = self.constant("pool_shape", [1, 1, self.length], np.int64)
        if mode == "cls":
            first = self.constant("pool_first", np.arange(self.length) == 0)
            real = self.node("Gather", [self.constant("pool_real", [0.0, 1.0]), mask], "pool_mask")
            places = self.inputs[interface.POSITION_IDS]
            is_first = self.node("Gather", [first, places], "pool_place")
            factors = self.node("Mul", [real, is_first], "pool_chosen")
            weights = self.node("Reshape", [factors, shape], "pool_weights")
        else:
            table = self.constant("pool_values", [_MASKED, 0.0])
            bias = self.node("Gather", [table, mask], "pool_mask")
            rows = self.node("Reshape", [bias, shape], "pool_bias")
            weights = self.node("Softmax", [rows], "pool_weights", axis=-1)
        product = self.node("MatMul", [weights, sequence], "pool_product")
        axis = self.constant("pool_axis", [1], np.int64)
        output = self.node("Squeeze", [product, axis], "pool_output")
        output.shape = None if sequence.shape is None else ir.Shape((1, sequence.shape[-1]))
        return output
