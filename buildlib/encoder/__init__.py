"""Text encoders: from anybody's ONNX to a container that Genie embeds texts with."""
