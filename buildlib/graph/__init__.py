"""From a checkpoint to float ONNX with the inputs and outputs that Genie expects."""
