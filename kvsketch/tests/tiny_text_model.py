"""A tiny random Llama with a tokenizer of its own, saved as a folder that any program can load as a model."""

from __future__ import annotations

from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from kvsketch.tests.tiny_models import tiny_model

VOCABULARY = 400


def tiny_tokenizer(*, opens: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer trained on a little text; with `opens` it puts its token ``<s>`` before every text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([topics["assignment"]], trainer)
    if opens:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", model_max_length=1024
    )


def save_text_model(folder: Path, *, chat: bool = False, **changes: Any) -> Any:
    """Write model and tokenizer into `folder`, with a chat template if asked; the model is returned too."""
    tokenizer = tiny_tokenizer()
    if chat:
        tokenizer.chat_template = "{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}<s>"
    tokenizer.save_pretrained(folder)
    model = tiny_model(vocab_size=VOCABULARY, **changes)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    return model
