"""Models: construction, parallelism, weights."""

from recipe_utils import exported

__getattr__ = exported(
    {
        "Attached": "recipe_utils.models.frozen",
        "attend_within_documents": "recipe_utils.models.attention.document_mask",
        "build_on_meta": "recipe_utils.models.construct",
        "build_pipeline": "recipe_utils.models.pipeline.microbatches",
        "build_stages": "recipe_utils.models.construct",
        "causal_lm": "recipe_utils.models.transformers.causal_lm",
        "has_output": "recipe_utils.models.pipeline.stages",
        "limits_of": "recipe_utils.models.sizes",
        "load_model": "recipe_utils.models.weights",
        "load_weights": "recipe_utils.models.weights",
        "local_stages": "recipe_utils.models.pipeline.stages",
        "lora_causal_lm": "recipe_utils.models.transformers.peft",
        "ModelSettings": "recipe_utils.models.settings",
        "nothing_attached": "recipe_utils.models.frozen",
        "num_to_run": "recipe_utils.models.pipeline.schedule",
        "parallelize": "recipe_utils.models.distribute",
        "PipelineSettings": "recipe_utils.models.pipeline.schedule",
        "speed_up_adapters": "recipe_utils.models.adapters.adapted_linear",
    }
)
