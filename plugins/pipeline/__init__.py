"""The pipeline: one recipe from a checkpoint to measured text on a device (see `pipeline.md`).

    from plugins.pipeline.llm import LLMPipeline

    pipe = LLMPipeline.from_pretrained("model_dir", recipe="recipe.yaml")
    pipe.construct()

The names are the vendor's ("Pipeline Overview", docs.qualcomm.com 80-87189-2).
"""
