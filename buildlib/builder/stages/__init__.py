"""Stages of a build, one a module, in the order in which they run.

author               checkpoint → float ONNX without encodings
import_onnx          anybody's ONNX → the same canonical form
import_mllm          a .mllm file → canonical ONNX with the integers and grids of the file
optimize_weights     keys and values rescaled, weights changed by GPTAQ and its like
complete_encodings   the missing encodings, by calibration
extract_embedding    the embedding table as a file of its own
arcl                 float ONNX → float ONNX at another (AR, CL)
transform            float ONNX → its parts, cut at layer boundaries, single-head
quantize_weights     integer weights of a part, once for all its shapes
convert              part with encodings → QDQ ONNX → DLC
compile_part         DLCs of one part → context binary
package              binaries and configurations → container
"""
