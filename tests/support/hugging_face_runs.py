"""The same training with Hugging Face's Trainer, which counts tokens differently."""

import tiny
from recipe_runs import tiny_config

from recipe_utils.update_steps.permutation import epoch_permutation

NUM_SAMPLES, BATCH_SIZE, ACCUMULATION, LR = 160, 4, 4, 0.01


def config(folder):
    """Returns this project's config of the tiny model, from a Hugging Face checkpoint with fresh weights."""
    return tiny_config(
        folder,
        checkpointer={
            "_component_": "recipe_utils.examples.fresh_llama_checkpointer",
            "model": tiny.MODEL,
            "checkpoint_dir": f"{folder}/fresh",
            "output_dir": f"{folder}/out",
        },
        dataset={"_component_": "tiny.tiny_dataset", "num_samples": NUM_SAMPLES},
        batch_size=BATCH_SIZE,
        gradient_accumulation_steps=ACCUMULATION,
        optimizer={"_component_": "torch.optim.AdamW", "lr": LR, "weight_decay": 0.0},
    )


def trainer_losses(config):
    """Returns logged losses of each update step, with the checkpoint and the data order of our recipe."""
    import torch
    from torch.utils.data import SequentialSampler
    from torchtune.data import padded_collate_sft
    from transformers import LlamaForCausalLM, Trainer, TrainingArguments

    class InOrder(Trainer):
        def _get_train_sampler(self, *_):
            return SequentialSampler(self.train_dataset)

    def collate(batch):
        collated = padded_collate_sft(batch)
        return {"input_ids": collated["tokens"], "labels": collated["labels"]}

    samples = tiny.make_samples(NUM_SAMPLES)
    order = epoch_permutation(NUM_SAMPLES, epoch=0, shuffle=True).tolist()
    folder = config["checkpointer"]["checkpoint_dir"]
    trainer = InOrder(
        model=LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32),
        args=TrainingArguments(
            output_dir=f"{folder}/trainer",
            per_device_train_batch_size=BATCH_SIZE,
            gradient_accumulation_steps=ACCUMULATION,
            num_train_epochs=1,
            learning_rate=LR,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=0.0,
            logging_steps=1,
            logging_strategy="steps",
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            remove_unused_columns=False,
            disable_tqdm=True,
        ),
        train_dataset=tiny.Samples([samples[i] for i in order]),
        data_collator=collate,
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
