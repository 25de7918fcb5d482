"""Wrong configs of every recipe: refused by key, value and what to set instead, before weights are read.

A config gets its row here if it would train something else, or nothing, without a word. A row is what a user appends to
the command and a regular expression that the error contains. Wrong types and values out of a key's own bounds:
``test_wrong_values.py``. Arguments that components refuse: ``recipe_utils/settings/``.
"""

import json
import re

import pytest
import tiny
from big_batch_of_views import HEAD, step_of_16
from omegaconf import DictConfig, OmegaConf
from recipe_runs import DINO, DPO, KD, SFT, recipe_class, refusal, run_recipe, slow
from torchtune.training import FullModelTorchTuneCheckpointer

from recipe_utils.dinov3.checkpoint import DINOv3Checkpointer
from recipe_utils.settings.problems import ConfigError

COSINE = "lr_scheduler._component_=torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup"
LORA = "lora_finetune_update_step"
GEMMA2 = json.dumps(tiny.GEMMA2_MODEL)
QUANTIZER = "quantizer._component_=torchtune.training.quantization."
QAT = f"{QUANTIZER}Int8DynActInt4WeightQATQuantizer quantizer.groupsize"
WEIGHTED = "[{_component_: tiny.tiny_dataset, num_samples: 8, name: a, loss_weight: 2}]"
NAMED = WEIGHTED.replace(", loss_weight: 2", "")
HELD_OUT = "run_val_every_n_steps=2 knn_neighbors=3 dataset_val._component_=tiny.{} dataset_val.num_images=9"

CODE = "{_component_: tiny.tiny_dataset, num_samples: 8, name: code%s}"
ALSO = "{_component_: tiny.tiny_dataset, num_samples: 24, weight: 2}"


def mixture(code, also=ALSO):
    """Returns the override that mixes a dataset, called code, with another one."""
    return f"dataset=[{CODE % code},{also}]"


SPLIT = "optimizer={_component_: recipe_utils.optim.Split, matrices: {_component_: torch.optim.Muon}, rest: {_component_: torch.optim.AdamW}}"
REFUSED = {
    # ---- Fine-tuning
    (SFT, "batchsize=3"): "batchsize: this recipe has no such key; did you mean batch_size",
    (SFT, "global_batch_size=7"): r"=7: batch_size=2 \* gradient_accumulation_steps=2 \* 1 data-parallel ranks = 4",
    (SFT, "dataset.num_samples=0"): "dataset: it has 0 samples",
    (SFT, "dataset.num_samples=8 last_update_step=drop batch_size=9"): "8 samples do not fill one update step of 18",
    (SFT, "model.max_seq_len=1000000000000"): r"model: its tables, of max_seq_len positions, take \d+ GiB .* a smaller max_seq_len",
    (SFT, "max_tokens_per_microbatch=64"): "max_tokens_per_microbatch=64: microbatching=in_order counts samples",
    (SFT, "microbatching=packed collate_fn=tiny.collate_images"): "collate_fn=tiny.collate_images",
    (SFT, f"microbatching=packed model={GEMMA2}"): "microbatching=packed: the model's Gemma2Attention",
    (SFT, "microbatching=packed max_tokens_per_microbatch=auto"): "max_tokens_per_microbatch=auto: this device has no exact peak of memory to measure; set a number",
    (SFT, "max_ranks_per_row=2"): "max_ranks_per_row=2: microbatching=in_order keeps every sample on its rank; remove the key, or set microbatching=packed",
    (SFT, "microbatching=packed max_ranks_per_row=2"): "max_ranks_per_row=2: without max_tokens_per_microbatch no row is too long for one; set max_tokens_per_microbatch",
    (SFT, "microbatching=packed max_tokens_per_microbatch=9 max_ranks_per_row=2 balance_over_ranks=False"): "max_ranks_per_row=2: balance_over_ranks=False keeps every sample on its rank; remove balance_over_ranks",
    (SFT, "microbatching=packed max_tokens_per_microbatch=9 max_ranks_per_row=6"): "max_ranks_per_row=6: it is not a power of two; set it to 4 or 8",
    (SFT, "packed_attention=by_document"): "packed_attention=by_document: it has no effect with microbatching=in_order",
    (SFT, "balance_over_ranks=True"): "balance_over_ranks=True: ",
    (SFT, "run_val_every_n_steps=2"): "run_val_every_n_steps=2: set dataset_val, too",
    (SFT, "pipeline_parallel_schedule=GPipe"): "=GPipe: it has no effect with pipeline_parallel_dim=1; .* more than 1",
    (SFT, "sample_losses=True loss._component_=torchtune.modules.loss.CEWithChunkedOutputLoss"): "sample_losses=True: .* does not sum by sample; set loss._component_",
    (SFT, "batch_size_val=3"): "batch_size_val=3: it has no effect with run_val_every_n_steps=",
    (SFT, "keep_best_checkpoint=True"): "keep_best_checkpoint=True: it has no effect with run_val_every_n_steps=",
    (SFT, "sample_max_new_tokens=7"): "sample_max_new_tokens=7: it has no effect with sample_prompts=",
    (SFT, "enable_activation_offloading=True"): "enable_activation_offloading=True: it needs enable_activation_checkpointing",
    (SFT, "enable_activation_offloading=True enable_activation_checkpointing=True"): "enable_activation_offloading=True: it needs device=cuda",
    (SFT, "enable_activation_checkpointing=True ac_mode=full"): "ac_mode=full: ",
    (SFT, "ac_mode=selective"): "ac_mode=selective: set ac_option, too",
    (SFT, "tensor_parallel_dim=2"): "tensor_parallel_dim=2: set tensor_parallel_plan, too",
    (SFT, "microbatching=packed packed_attention=flex"): "packed_attention=flex: it needs device=cuda",
    (SFT, "sample_prompts=[Hi]"): "sample_prompts, sample_every_n_steps: one has no effect without the other; set both",
    (SFT, "pipeline_parallel_dim=2 sample_prompts=[Hi] sample_every_n_steps=1"): "sample_prompts: pipeline_parallel_dim=2 cannot generate",
    (DINO, "sample_losses=True"): "sample_losses=True: losses of views are not by image; remove the key",
    (SFT, "collate_fn=torchtune.data.left_pad_sequence"): "collate_fn=torchtune.data.left_pad_sequence",
    (SFT, "optimizer_in_bwd=True"): "gradient_accumulation_steps=2",
    (SFT, "optimizer_in_bwd=True gradient_accumulation_steps=1 microbatching=least_padding"): "microbatching=least_padding",
    (SFT, "optimizer_in_bwd=True gradient_accumulation_steps=1 microbatching=packed max_tokens_per_microbatch=64"): "microbatching=packed: .* set optimizer_in_bwd to False",
    (SFT, "optimizer_in_bwd=True gradient_accumulation_steps=null global_batch_size=4"): "global_batch_size=4: with optimizer_in_bwd=True .* 2 times; set",
    (SFT, "optimizer_in_bwd=True gradient_accumulation_steps=1 clip_grad_norm=1.0"): "clip_grad_norm=1.0",
    (SFT, SPLIT + " optimizer_in_bwd=True gradient_accumulation_steps=1"): "optimizer_in_bwd=True: recipe_utils.optim.Split needs all",
    (SFT, SPLIT + " optimizer.names=nowhere"): "optimizer.names=nowhere: it leaves no parameter to matrices; there are tok_emb",
    (SFT, SPLIT + " optimizer.rest.maximize=True"): "optimizer.rest.maximize=True: it would raise",
    (DINO, SPLIT): "optimizer._component_=recipe_utils.optim.Split: rates and weight decay by depth need one optimizer",
    (SFT, "optimizer.maximize=True"): "optimizer.maximize=True: it would raise the loss",
    (SFT, "optimizer.foreach=True optimizer.fused=True"): "optimizer: RuntimeError: `fused` and `foreach` cannot be",
    (SFT, "optimizer={_component_: torch.optim.LBFGS}"): "optimizer: a step on parameters as the training has them fails; set torch.optim.AdamW .*closure",
    (SFT, "optimizer={_component_: torch.optim.SGD, fused: True} dtype=bf16 weights_dtype=fp32"): "optimizer: a step on .* fails; take fused out, or set torch.optim.AdamW .*sharding",
    (SFT, "lr_scheduler={_component_: torch.optim.lr_scheduler.StepLR, step_size: 2}"): "lr_scheduler._component_=StepLR: its rates depend on those before, so a resume would",
    (SFT, f"{COSINE} lr_scheduler.num_warmup_steps=1 lr_scheduler.last_epoch=5"): "lr_scheduler.last_epoch=5: the recipe sets it",
    (SFT, "checkpointer.resume_from_checkpoint=True"): "checkpointer.resume_from_checkpoint=True: training does not resume from",
    (SFT, "custom_sharded_layers=[nope]"): "custom_sharded_layers=nope: the model has no such module",
    (SFT, "ac_option=2"): "ac_option=2: it has no effect with ac_mode=null; set ac_mode to selective",
    (SFT, "loss={_component_: torch.nn.NLLLoss}"): "loss: NLLLoss takes log-probabilities",
    (SFT, "loss={_component_: tiny.MeanOverPositions}"): "loss: MeanOverPositions is no mean over target tokens",
    (SFT, "optimizer.lr=.inf"): "optimizer.lr=inf: it must be finite",
    (SFT, "dataset={_component_: tiny.endless_dataset}"): "dataset: a generator has no length; set it to a map-style dataset",
    (SFT, "loss={_component_: torch.nn.CrossEntropyLoss, label_smoothing: -1.0}"): "loss.label_smoothing=-1.0: it must",
    (SFT, "loss.tokens_per_chunk=0"): "loss.tokens_per_chunk=0: it must be at least 1",
    (SFT, f"dataset={WEIGHTED} loss={{_component_: torch.nn.CrossEntropyLoss}}"): r"dataset.0.loss_weight=2: torch.nn.CrossEntropyLoss cannot weight targets; set",
    (SFT, f"dataset={WEIGHTED.replace('2', '0')}"): r"dataset.0.loss_weight=0: it must be a number above 0",
    (SFT, "dataset.has_weights=True loss={_component_: torch.nn.CrossEntropyLoss}"): "dataset: sample 1 of dataset: its 'weights' contains 0.1, which this loss does not take; set weight to 0 or 1 in all",
    (KD, "dataset.has_weights=True on_bad_sample=skip"): "dataset: sample 1 of dataset: its 'weights' contains 0.1, which this loss does not take",
    (SFT, "loss_weights=datasets"): "loss_weights=datasets: it has no effect without named datasets; set",
    (SFT, f"loss_weights=datasets dataset={NAMED} loss={{_component_: torch.nn.CrossEntropyLoss}}"): "loss_weights=datasets: torch.nn.CrossEntropyLoss cannot",
    (SFT, f"dataset_val={WEIGHTED} run_val_every_n_steps=1"): r"dataset_val.0.loss_weight=2: validation has no weights",
    (KD, f"dataset={WEIGHTED}"): r"dataset.0.loss_weight=2: this recipe weights no datasets; remove it",
    (DPO, f"dataset={WEIGHTED}"): r"dataset.0.loss_weight=2: this recipe weights no datasets; remove it",
    (DPO, "microbatching=packed max_ranks_per_row=2"): "max_ranks_per_row=2: one rank computes both answers of a pair; remove the key",
    (SFT, "loraplus_lr_ratio=4.0"): "loraplus_lr_ratio=4.0: the model has no LoRA",
    (SFT, "memory_efficient_fsdp_wrap=True"): "memory_efficient_fsdp_wrap=True: it must be False",
    (SFT, "context_parallel_dim=2"): "context_parallel_dim=2: .* and max_ranks_per_row=2",
    (SFT, "quantizer={groupsize: 16}"): r"quantizer=\{'groupsize': 16\}: it must .* set quantizer._component_ to its path",
    (SFT, f"tensor_parallel_dim=2 {QAT}=16"): "tensor_parallel_dim=2: a quantizer needs whole weights",
    # ---- Mixtures
    (SFT, f"dataset=[{ALSO},{ALSO}]"): "dataset: 2 of its datasets are called tiny_dataset; give each a name",
    (SFT, mixture("")): "dataset: 1 of 2 datasets have a weight; give all of them one, or none",
    (SFT, mixture(", weight: .nan")): "dataset.0.weight=nan: it must be a number above 0",
    (SFT, mixture(", weight: '0.5'")): "dataset.0.weight='0.5': it must be a number above 0",
    (SFT, mixture(", weight: 1").replace("name: code", "name: ../x")): "dataset.0.name='../x': metrics are named by it",
    (SFT, "+epochs=2"): "no such key; write it without the +",
    (SFT, "optimizer={_component_:torch.optim.AdamW}"): "optimizer=.*: YAML needs a space after each colon",
    (SFT, "lr_scheduler={_component_: torch.optim.lr_scheduler.ReduceLROnPlateau}"): "lr_scheduler._component_: ReduceLROnPlateau does not take last_epoch.*; torchtune.training.lr_schedulers",
    (SFT, mixture(", weight: 1", "{_component_: tiny.tiny_dataset, num_samples: 0, weight: 2}")): "dataset.tiny_dataset: it has 0 samples; take the dataset out",
    (SFT, mixture(", weight: 1") + " mixture={samples_per_epoch: 3}"): "mixture.samples_per_epoch=3: an update step has 4 samples; set it to as many",
    (SFT, f"dataset_val=[{ALSO}] run_val_every_n_steps=2"): "dataset_val: validation takes each sample once; take the weights out",
    (SFT, "dataset={_component_: recipe_utils.text.conversation_dataset, path: /no.jsonl} tokenizer={_component_: tiny.tiny_tokenizer}"): "dataset: set tokenizer to a folder_tokenizer",
    (SFT, "mixture={samples_per_epoch: 9}"): "mixture: it has no effect without a list of weights; set dataset",
    # ---- Adapters
    (LORA, "checkpointer.checkpoint_files=[]"): r"checkpointer.checkpoint_files=\[\]: it is empty; list",
    (LORA, "model.lora_rank=0"): "model.lora_rank=0: ",
    (LORA, "model.lora_alpha=0"): "model.lora_alpha=0: ",
    (LORA, "model.lora_dropout=1.0"): "model.lora_dropout=1.0: ",
    (LORA, "model.lora_attn_modules=[o_proj]"): r"model.lora_attn_modules=\['o_proj'\]",
    (LORA, "model.quantize_base=True"): r"model.quantize_base=True: layers.0.attn.q_proj.weight \(32, 32\) .*16384",
    (LORA, f"{QAT}=16 model.use_dora=True"): "quantizer=.*not for DoRA",
    (LORA, f"{QAT}=0"): "quantizer.groupsize=0: it does not divide 32",
    (LORA, f"{QAT}=16 model.quantize_base=True"): "quantizer=.*NF4",
    (LORA, f"{QUANTIZER}Int4WeightOnlyQuantizer"): "quantizer=.*cannot be trained with",
    (LORA, "loraplus_lr_ratio=4.0 optimizer_in_bwd=True gradient_accumulation_steps=1"): "ratio=4.0: with optimizer_in_bwd",
    (LORA, "fsdp={offload: True}"): r"fsdp=\{'offload': True\}",
    # ---- Preferences
    (DPO, "loss={_component_: recipe_utils.losses.LinearCrossEntropyLoss}"): "loss: LinearCrossEntropyLoss does not take log-prob",
    (DPO, "loss.beta=-0.1"): "loss: DPOLoss teaches the rejected answers",
    (DPO, "loss.label_smoothing=0.5"): "loss: DPOLoss teaches nothing",
    (DPO, "loss.label_smoothing=-0.1"): "loss.label_smoothing=-0.1: it must be at least 0 and below 0.5",
    (DPO, "loss={_component_: recipe_utils.preference.IPOLoss, tau: -1.0}"): "loss.tau=-1.0: it must be above 0",
    (DPO, "dataset={_component_: tiny.tiny_dataset, num_samples: 8}"): "its samples have labels, tokens instead of chosen_input_ids",
    (DPO, "prefix_sharing=True microbatching=least_padding"): "prefix_sharing=True: microbatching=least_padding gives each",
    (DPO, "sft_loss_weight=.inf"): "sft_loss_weight=inf: it must be",
    (DPO, "reference_cache_dir=/tmp/nowhere"): "=/tmp/nowhere: it has no effect with reference=live; set reference to cached",
    (DPO, "reference=cached reference_cache_dir=/proc/nowhere"): "=/proc/nowhere: it cannot be written to",
    (DPO, "collate_fn=tiny.collate_images"): "collate_fn=tiny.collate_images: pairs are",
    (DPO, f"model={json.dumps(tiny.adapted(tiny.MODEL, lora_dropout=0.5))}"): "model.lora_dropout=0.5: .* set it to 0",
    (DPO, "model.attn_dropout=0.1"): "model.attn_dropout=0.1: each forward would draw other masks, .* set it to 0",
    (DPO, f"model={json.dumps(tiny.adapted(tiny.MODEL))}"): "ref_checkpointer: the reference of a model with adapters is",
    # ---- Distillation
    (KD, "teacher_model=null"): "teacher_model: it is missing; set it to a component",
    (KD, f"teacher_model={json.dumps(tiny.adapted(tiny.TEACHER_MODEL))}"): "teacher_model: it has adapters",
    (KD, "teacher_model={_component_: torch.nn.Linear, in_features: 2, out_features: 2}"): "a Linear returns no hidden states",
    (KD, "kd_loss.tokens_per_chunk=0"): "kd_loss.tokens_per_chunk=0: it must be at least 1",
    (KD, "kd_loss.temperature=0"): "kd_loss.temperature=0: it must be from 0.01 to 1000",
    (KD, "kd_loss.mixture=0.3"): "kd_loss.mixture=0.3: it has no effect with divergence=forward",
    (KD, "kd_loss.ignore_index=5"): "kd_loss.ignore_index=5: it has no effect with loss.ignore_index=-100; remove",
    (KD, "tensor_parallel_dim=2"): "tensor_parallel_dim=2: not with a teacher; remove the key",
    (KD, "teacher_custom_sharded_layers=[nope]"): "- teacher_custom_sharded_layers=nope: the model has no such module; take it out",
    (KD, "teacher_model={_component_: recipe_utils.models.causal_lm, path: /no}"): "- teacher_model.path=/no: ",
    (KD, "optimizer_in_bwd=True gradient_accumulation_steps=1"): "optimizer_in_bwd=True: not with a teacher; remove the key",
    (KD, "teacher_pipeline_parallel_split_points=[1]"): r"=\[1\]: it has no effect with pipeline_parallel_dim=1",
    (KD, f"microbatching=packed teacher_model={GEMMA2}"): "microbatching=packed: the (teacher_)?model's Gemma2Attention",
    # ---- Self-supervised vision: how many
    (DINO, "batch_size=6 koleo_group_size=2"): r"global_batch_size=16: .* batch_size=6 \* 1 .* = 6; .* 12 and 18",
    (DINO, "batch_size=8 koleo_group_size=3"): "koleo_group_size=3: .* batch_size=8 is not a multiple .* batch_size to 9",
    (DINO, "batch_size=1 global_batch_size=1 koleo_group_size=null"): "koleo_loss_weight=0.3: .* 1 image; .* 2 or more",
    (DINO, "max_ranks_per_row=2"): "max_ranks_per_row=2: all images have the same number of tokens, .* remove the key",
    (DINO, "max_tokens_per_microbatch=64"): "max_tokens_per_microbatch=64: all images have .* remove the key",
    (DINO, "microbatching=packed"): "microbatching=packed: all images have the same number of tokens, .* remove the key",
    (DINO, "custom_sharded_layers=[tok_embeddings,output]"): "- custom_sharded_layers=output: the loss calls .* take it out",
    (DINO, "custom_sharded_layers=[output.dino.prototypes]"): "custom_sharded_layers=output.dino.prototypes: the loss",
    (DINO, "dataset={_component_: tiny.samples_dataset, tokenizer: null}"): "dataset: .*labels.* and no image; set it to a dataset of",
    # ---- Crops, masks and what is compared
    (DINO, "transform.std=[0.9]"): r"checkpointer.image_std=\[0.4\]: .* transform.std=\[0.9\]; set it to \$\{transform.std\}",
    (DINO, "transform.local_crop_size=7"): "local_crop_size=7: .* patch_size=4; .* 4 and 8",
    (DINO, "mask_ratio=[0.5,0.1]"): r"mask_ratio=\[0.5, 0.1\]",
    (DINO, "mask_ratio=[0,0.01]"): r"mask_ratio=\[0.0, 0.01\]: .*or ibot_loss_weight=0",
    (DINO, "mask_probability=0.01"): "with mask_probability=0.01 .* 16 images masks no patch",
    (DINO, "dino_head.num_prototypes=1"): "dino_head.num_prototypes=1: .*2",
    (DINO, "ema_momentum=1.0"): "ema_momentum=1.0: .* would never move; set it below 1",
    (DINO, "student_temperature=1e30"): "student_temperature=.*at most 10",
    (DINO, "teacher_temperature=0.1"): "teacher_temperature=0.1: student_temperature=0.1 .* set it lower",
    (DINO, "teacher_temperature_warmup_steps=3"): "teacher_temperature_warmup_steps=3: .* set both or neither",
    (DINO, "gram_teacher_every_n_steps=null"): "gram_loss_weight=0.5: there is no Gram teacher; set gram_teacher_every",
    (DINO, "gram_loss_weight=0"): "gram_teacher_every_n_steps=2: it has no effect with gram_loss_weight=0",
    (DINO, " ".join(f"{term}_loss_weight=0.0" for term in ("dino", "ibot", "koleo", "gram")) + " gram_teacher_every_n_steps=null"):
        "dino_loss_weight, .*: all are 0, so nothing would be learned; set one above 0",
    (DINO, "weight_decay_end=0.4"): "weight_decay_end=0.4: it starts from optimizer.weight_decay; set that above 0",
    # ---- Models and runs
    (DINO, "model._component_=tiny.normalized_by_batch"): "model: its norm is a BatchNorm1d, .*LayerNorm",
    (DINO, "model.drop_path=3"): r"1 problem .*\n.*model.drop_path=3: it must be at least 0 and below 1",
    (DINO, "model={_component_: recipe_utils.dinov3.dinov3_vit_s16, num_layers: many}"): "model.num_layers='many': dinov3_vit_s16 takes int",
    (DINO, "tensor_parallel_dim=2"): "tensor_parallel_dim=2: not with images; remove the key",
    (DINO, "optimizer_in_bwd=True"): "optimizer_in_bwd=True: not with a moving average; remove the key",
    (DINO, "sample_prompts=[Hi] sample_every_n_steps=1"): "sample_prompts=.*: a vision transformer generates no text; remove the key",
    # ---- Nearest neighbors
    (DINO, HELD_OUT.format("tiny_images") + " dataset_knn=${dataset_val}"): "dataset_val: it has the images of dataset_knn, so each would",
    (DINO, HELD_OUT.format("unlabeled_images")): "dataset_val: its images have no labels",
    (DINO, HELD_OUT.format("unlabeled_images") + " dataset_val.label=cat"): "dataset_val: its images have labels such as 'cat', not",
    (DINO, HELD_OUT.format("unlabeled_images") + " dataset_val.label=-1"): "dataset_val: its images have labels such as -1, not",
    (DINO, HELD_OUT.format("tiny_images") + " knn_neighbors=38"): "knn_neighbors=38: dataset_knn has 37 images; set it to fewer",
}  # fmt: skip
SEVERAL = ("tensor_parallel_dim=", "pipeline_parallel_dim=", "enable_activation_offloading=")
"""Values that prevent other components from being built, or that are wrong in two ways."""


def with_overrides(config, overrides):
    """Returns a config with ``KEY=VALUE KEY=VALUE`` of a command line, parsed as ``tune run`` does."""
    cfg = OmegaConf.create(config)
    for override in re.split(r" (?=[\w.]+=)", overrides):
        key = override.partition("=")[0]
        parsed = OmegaConf.from_dotlist([override])
        value = OmegaConf.to_container(parsed, resolve=False)
        for part in key.split("."):
            value = value[part]
        OmegaConf.update(cfg, key, value, merge=False)
    return cfg


@pytest.fixture
def wrong_config(tiny_config, tiny_dpo_config, tiny_kd_config, monkeypatch):
    """Returns a function that makes the config of a row. Weights cannot be read."""
    for checkpointer in (FullModelTorchTuneCheckpointer, DINOv3Checkpointer):
        monkeypatch.setattr(checkpointer, "load_checkpoint", lambda *_: pytest.fail("reads weights"))
    kd_loss = {"_component_": "recipe_utils.distillation.LinearDistillationLoss", "temperature": 2.0}
    makers = {
        SFT: tiny_config,
        LORA: lambda: tiny_config(model=tiny.adapted(tiny.MODEL)),
        DPO: tiny_dpo_config,
        KD: lambda: tiny_kd_config(teacher_sizes=tiny.TEACHER_MODEL, kd_loss=kd_loss, kd_ratio=0.5),
        DINO: lambda: step_of_16(tiny_config, batch_size=16),
    }
    with tiny.samples_of_the_test([{"tokens": [1, 2], "labels": [1, 2]}] * 8):
        yield lambda recipe, overrides: with_overrides(makers[recipe](), overrides)


@pytest.mark.parametrize(("recipe", "overrides"), REFUSED, ids=lambda value: value[:80])
def test_a_wrong_config_is_refused_by_key(recipe, overrides, wrong_config, tmp_path):
    found = refusal(wrong_config(recipe, overrides), SFT if recipe == LORA else recipe)
    assert re.search(REFUSED[recipe, overrides], found), found
    assert "1 problem" in found or overrides.startswith(SEVERAL), found
    assert not list(tmp_path.glob("out/*"))


REMEDY = r"(?:remove|take|leave) (it|(?:the|this) key|[a-z_]+)|set (it|[a-z_]+)(?:=| to )(True|False|null|packed|in_order|least_padding|[0-9.]+)"


def remedied(config, problem):
    """Yields the config after each remedy of a problem that a program can read."""
    key = problem.key.partition("=")[0]
    for removed, changed, value in re.findall(REMEDY, problem.text):
        name = removed or changed
        name = key if name in ("it", "the key", "this key") else name
        parent, _, last = name.rpartition(".")
        cfg = OmegaConf.create(config)
        mapping = OmegaConf.select(cfg, parent) if parent else cfg
        if changed:
            OmegaConf.update(cfg, name, OmegaConf.from_dotlist([f"value={value}"]).value)
            yield cfg
        elif isinstance(mapping, DictConfig) and last in mapping:
            del mapping[last]
            yield cfg


def problems_of(config, recipe):
    """Returns the problems of a config; none if its weights are read."""
    cfg = OmegaConf.create(config)
    try:
        recipe_class(SFT if recipe == LORA else recipe)(cfg).setup(cfg)
    except ConfigError as error:
        return error.problems
    except pytest.fail.Exception:
        return ()


LED_BACK = [row for row in REFUSED if re.search("max_ranks_per_row=2$|max_tokens_per_microbatch=64$", row[1])]


@pytest.mark.parametrize(("recipe", "overrides"), [row if row in LED_BACK else slow(*row) for row in REFUSED])
def test_no_remedy_leads_back(recipe, overrides, wrong_config):
    """What is wrong after it is another problem, and no remedy of that brings the first one back."""
    config = wrong_config(recipe, overrides)
    for problem in problems_of(config, recipe):
        for changed in remedied(config, problem):
            for further in problems_of(changed, recipe):
                assert str(further) != str(problem)
                for again in remedied(changed, further):
                    assert str(problem) not in map(str, problems_of(again, recipe)), further


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"ema_momentum": 2, "seeds": 3, "gram_over": "batch"}, {"ema_momentum=2", "seeds", "gram_over"}),
        ({"batch_size": 6, "ema_momentum": 1.0}, {"ema_momentum=1.0", "global_batch_size=16"}),
    ],
    ids=["keys", "combinations"],
)
def test_all_problems_are_reported_at_once(changes, expected, tiny_config):
    """Problems of single keys are reported first; if there are none, those between keys."""
    with pytest.raises(ConfigError) as error:
        recipe_class(recipe=DINO)(OmegaConf.create(step_of_16(tiny_config, **changes)))
    assert {str(problem).split(":")[0] for problem in error.value.problems} == expected


def test_heads_of_another_width_than_the_checkpoint_s_are_named(tiny_config):
    config = step_of_16(tiny_config, batch_size=16, max_steps_per_epoch=1)
    run_recipe(config, DINO)
    given = {**config["checkpointer"], "checkpoint_dir": f"{config['output_dir']}/epoch_0"}
    changed = {"ibot_head": {**HEAD, "bottleneck_dim": 7}, "checkpointer": given}
    text = refusal({**config, **changed}, DINO)
    assert "output.ibot" in text
    assert re.search(r"\(7, 10\).*\(6, 10\)|\(6, 10\).*\(7, 10\)", text), text
