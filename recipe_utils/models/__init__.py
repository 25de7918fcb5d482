"""Models: construction, parallelism, weights."""

from recipe_utils import exported

__getattr__ = exported(
    {
        "recipe_utils.models.adapters.adapted_linear": "speed_up_adapters",
        "recipe_utils.models.attention.document_mask": "attend_within_documents",
        "recipe_utils.models.construct": "build_on_meta build_stages",
        "recipe_utils.models.distribute": "parallelize small_model",
        "recipe_utils.models.frozen": "Attached nothing_attached one_after_the_other reference_checkpointer",
        "recipe_utils.models.pipeline.microbatches": "build_pipeline",
        "recipe_utils.models.pipeline.schedule": "num_to_run PipelineSettings",
        "recipe_utils.models.pipeline.stages": "has_output local_stages",
        "recipe_utils.models.settings": "ModelSettings",
        "recipe_utils.models.sizes": "limits_of",
        "recipe_utils.models.transformers.causal_lm": "causal_lm",
        "recipe_utils.models.transformers.peft": "lora_causal_lm",
        "recipe_utils.models.weights": "load_model load_weights",
    }
)
