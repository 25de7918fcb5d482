"""Tokenizer of a transformers folder, whose chat template determines the targets by rendering."""

import inspect
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import date as calendar_date
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jinja2 import TemplateError, nodes
from jinja2.meta import find_undeclared_variables
from tokenizers import AddedToken, Tokenizer
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import _compile_jinja_template

from recipe_utils.text.conversations.messages import Conversation, read_tools, read_turns
from recipe_utils.text.conversations.template import ChatTemplate, Encoded, Rendering, any_of, num_common
from recipe_utils.text.images.processor import ImageProcessor, ProcessedImages, replaced
from recipe_utils.text.images.sample import ImageInputs
from recipe_utils.text.images.sources import num_images_in, open_image
from recipe_utils.torchtune_names import log_rank_zero
from recipe_utils.update_steps.samples import SampleError

_SEEDS = (
    "It is 2024-01-31, 12:05; 1234567 + 89 = 1234656.", "a  b   c\td\n\n\ne \r\n f", "l'été, naïve, Straße, ÅÄÖ, e\u0301",
    "こんにちは、世界。 你好\uff0c世界\uff01 안녕하세요", "Привет, мир; שלום; مرحبا; नमस्ते; ไทย", "def f(x_1, *args):\n    return {'a': x_1[0]}",
    "I'm, you'll, WE'RE, don't", "https://a.b/c?d=e&f=%20#g", "😀👩‍👩‍👧 ≠ ½ ﬁ \uff46\uff55\uff4c\uff4c", "HelloWorld camelCase snake_case ABCdef",
)  # fmt: skip
_PROBES = [
    text[start:end].join(ends)
    for text in _SEEDS
    for ends in (("", ""), (" ", " "), ("\n", "1"))
    for start, end in ((0, None), (1, None), (3, -2), (5, None), (7, 20), (0, 9), (2, 4), (0, 1))
]
"""Texts on which tokenizers differ that split digits, spaces, accents or scripts otherwise."""


class Tokenized(NamedTuple):
    """Tokens of a conversation."""

    tokens: np.ndarray
    """[t] int64."""
    turns: np.ndarray
    """[t] int64: the index of the turn whose target each is, or -1."""
    images: ImageInputs | None = None
    """What a model takes beside them if the data have images."""


class FolderTokenizer:
    """Tokenizer of a local transformers folder, for recipes and datasets of torchtune.

    Args:
        path: folder with ``tokenizer.json``, and with a chat template if samples are messages.
        max_seq_len: number of tokens that samples are truncated to, on the right; null for no limit.
        train_on_last: train only the last assistant message of a sample.
        date: date that the chat template prints as today's, ``YYYY-MM-DD``.
        template_variables: further variables of the chat template, such as ``enable_thinking``.
        from_pretrained: arguments of ``AutoTokenizer.from_pretrained``, such as ``fix_mistral_regex: True``.
            Ids are then those of the class that it chooses, otherwise those of ``tokenizer.json``.
        images: arguments of the folder's image processor, such as ``max_pixels: 262144`` or ``size``.

    Raises:
        ValueError: the folder has no fast tokenizer, or its chat template needs a date or does not use a variable.
    """

    def __init__(
        self,
        path: str,
        max_seq_len: int | None = None,
        train_on_last: bool = False,
        date: str | None = None,
        template_variables: dict[str, Any] | None = None,
        from_pretrained: dict[str, Any] | None = None,
        images: dict[str, Any] | None = None,
    ) -> None:
        if not Path(path, "tokenizer.json").is_file():
            text = "no tokenizer.json; set it to a folder of transformers with a fast tokenizer"
            raise ValueError(f"tokenizer.path={path}: {text}")
        if max_seq_len is not None and max_seq_len < 1:
            raise ValueError(f"tokenizer.max_seq_len={max_seq_len}: set it to at least 1")
        self.max_seq_len, self._path, self._train_on_last = max_seq_len, Path(path), train_on_last
        self._warned: set[str] = set()
        self._image_options = images or {}
        files = "tokenizer_config", "generation_config", "config", "special_tokens_map", "added_tokens", "tokenizer"
        config, *models = [self._json_of(f"{name}.json") for name in files][:3]
        self.tokenizer, self._backend = inner, backend = self._load(from_pretrained)
        self.vocab_size = backend.get_vocab_size()
        # A processor takes the template of a file of its own, which a tokenizer does not read.
        of_processor = self._json_of("chat_template.json").get("chat_template")
        if of_processor and not Path(path, "chat_template.jinja").is_file():
            if inner.chat_template not in (None, of_processor):
                self._warn("its chat template is that of chat_template.json, and not of tokenizer_config.json")
            inner.chat_template = of_processor
        template = inner.chat_template  # one, or several by name
        sources = [*template.values()] if isinstance(template, dict) else [template or ""]
        source = "\n".join(sources)
        self._variables = template_variables or {}
        given = {"messages", *inspect.signature(inner.apply_chat_template).parameters, *inner.SPECIAL_TOKENS_ATTRIBUTES}
        self.template_variables = frozenset().union(*map(_variables_of, sources)) - (given - {"documents"})
        """Names of variables that the chat template reads, without those that every conversation gives it."""
        # A misspelt variable would be ignored in silence.
        for name in self._variables:
            if name not in self.template_variables:
                known = ", ".join(sorted(self.template_variables)) or "none"
                text = f"the chat template of {path} reads no such variable (it reads: {known}); correct its name"
                raise ValueError(f"tokenizer.template_variables.{name}: {text}, or take it out")
        # A template that prints today's date would change the tokens of a run that resumes tomorrow.
        self._constants = {"documents": None, **inner.special_tokens_map}
        if "strftime_now" in source:
            if date is None:
                raise ValueError(
                    "tokenizer.date=None: the chat template prints today's date, which would change the "
                    f"tokens of a run that resumes; set it, such as to '{calendar_date.today()}'"
                )
            self._constants["strftime_now"] = calendar_date.fromisoformat(date).strftime
        # Ends of a generation, and whether texts begin with a BOS, are spread over four files of the folder.
        specials = inner.bos_token, inner.eos_token, inner.pad_token
        self.bos_id, self.eos_id, pad_id = (token and backend.token_to_id(token) for token in specials)
        self.pad_id = next(i for i in (pad_id, self.eos_id, 0) if i is not None)
        ends: Any = next((ids for c in models if (ids := c.get("eos_token_id")) is not None), [])
        listed = ends if isinstance(ends, list) else [ends]
        if wrong := [each for each in listed if not isinstance(each, int)]:
            text = (
                f"eos_token_id={wrong[0]!r} of generation_config.json or config.json is no token id; write its number"
            )
            raise ValueError(f"tokenizer.path={path}: {text}")
        ids = {*listed, self.eos_id} - {None}
        names = {i: token for i in sorted(ids) if (token := backend.id_to_token(i))}
        self.stop_tokens: list[int] = [*names]
        """Tokens that end a generation, those of ``generation_config.json`` included."""
        self._begin = [i for i in inner.backend_tokenizer.encode("").ids if i == inner.bos_token_id]
        prints_bos = re.search(rf"bos_token|{re.escape(inner.bos_token or 'bos_token')}", source)
        adds_bos = config.get("add_bos_token", bool(prints_bos))
        self._is_without_bos = bool(not self._begin and self.bos_id is not None and adds_bos)
        added = backend.get_added_tokens_decoder()
        self._separators = {i: token.content for i, token in added.items() if not token.normalized}
        self._special_ids = {i for i, token in added.items() if token.special}
        self._special = any_of([added[i].content for i in self._special_ids])
        used = [token.content for token in added.values() if token.content in source]
        variables = self.template_variables
        self._template = ChatTemplate(
            self._render, source, variables, names, used, self._separators, self._path, self._warn
        )

    @cached_property
    def images(self) -> ImageProcessor:
        """The folder's processor of images. Raises ValueError if it has none that can be used."""
        return ImageProcessor(self._path, self.tokenizer, self._image_options)

    def _json_of(self, name: str) -> dict[str, Any]:
        """Returns the content of a file of the folder, if it exists."""
        file = self._path / name
        try:
            content = json.loads(file.read_text("utf-8")) if file.is_file() else {}
        except ValueError as error:
            raise ValueError(f"tokenizer.path={self._path}: {name} is not JSON ({error}); copy it again") from None
        if not isinstance(content, dict):
            text = f"is a {type(content).__name__}, not a JSON object; copy it again"
            raise ValueError(f"tokenizer.path={self._path}: {name} {text}")
        return content

    def _load(self, options: dict[str, Any] | None) -> tuple[Any, Tokenizer]:
        """Returns the tokenizer of the folder's class, and one that encodes: without ``options`` by ``tokenizer.json``."""
        file = Tokenizer.from_file(str(self._path / "tokenizer.json"))
        loaded = AutoTokenizer.from_pretrained(
            self._path, **{"local_files_only": True, "trust_remote_code": False, **(options or {})}
        )
        by_class = loaded.backend_tokenizer  # starts no threads, with which workers cannot fork
        for tokenizer in (file, by_class):
            tokenizer.no_truncation()
            tokenizer.no_padding()
        if options is not None:
            return loaded, by_class
        # Tokens may be in tokenizer_config.json alone; of others it says which are special, and the file how they are found.
        own, tokens = file.get_added_tokens_decoder(), []
        for index, token in sorted(loaded.added_tokens_decoder.items()):
            if index in own and own[index].content == token.content:
                flags = {name: getattr(own[index], name) for name in ("single_word", "lstrip", "rstrip", "normalized")}
                token = AddedToken(token.content, special=token.special, **flags)
            tokens.append(token)
        file.add_tokens(tokens)
        for text in _PROBES:
            if by_class.encode(text, add_special_tokens=False).ids != file.encode(text, add_special_tokens=False).ids:
                self._warn(
                    f"{type(loaded).__name__}, the class of its tokenizer_config.json, encodes {text!r} otherwise "
                    "than tokenizer.json, which is taken (set tokenizer.from_pretrained={} to take the class)"
                )
                break
        return loaded, file

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            log_rank_zero(f"tokenizer.path={self._path}: {text}", logging.WARNING)

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True, is_rendered: bool = False) -> list[int]:
        """Returns the tokens of a text, with a BOS only if the folder's tokenizer adds one.

        Raises SampleError if the text contains a special token, which would be trained, and not ``is_rendered``.
        """
        if add_bos and self._is_without_bos:
            self._warn(f"texts start without {self.tokenizer.bos_token}, with which this model's texts start")
        try:
            tokens = self._backend.encode(text, add_special_tokens=False).ids
        except TypeError:  # of a lone surrogate
            tokens = []
        if not tokens or not (is_rendered or self._special_ids.isdisjoint(tokens)):
            self._check(text)
        end = [self.eos_id] if add_eos and self.eos_id is not None else []
        return [*(self._begin if add_bos else []), *tokens, *end]

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of tokens."""
        return self._backend.decode([*map(int, token_ids)], skip_special_tokens)

    def __call__(self, sample: Mapping[str, Any], inference: bool = False) -> dict[str, Any]:
        """Returns a sample with ``tokens`` and ``mask`` for its ``messages`` and ``tools``."""
        rest = dict(sample)
        messages, tools = rest.pop("messages"), rest.pop("tools", None)
        tokens, mask = self.tokenize_messages(messages, not inference, tools)
        return {**rest, "tokens": tokens, "mask": mask}

    def tokenize_messages(
        self, messages: Sequence[Any], add_eos: bool = True, tools: Any = None
    ) -> tuple[list[int], list[bool]]:
        """Returns the tokens of a conversation, and for each whether it is masked (no target).

        Messages are torchtune's, or mappings in OpenAI's format, where assistants train unless their ``weight`` is 0;
        ``tools`` are in that format, or their JSON text.
        ``add_eos=False`` returns the prompt of a generation, without an empty last message. Raises SampleError, with the
        turn, if the template does not determine the targets.
        """
        chat, weights = read_turns(messages)
        for index, weight in enumerate(weights):
            if weight not in (0, 1):
                text = "set it to 0 or 1, or dataset to a conversation_dataset"
                raise SampleError(f"turn {index} ({chat[index]['role']}): weight={weight:g}: {text}")
        # A training has the whole conversation, a generation its prompt.
        conversation = Conversation(chat, weights, read_tools(tools))
        if add_eos:
            tokens, turns, _ = self.tokenize(conversation)
            return tokens.tolist(), (turns < 0).tolist()
        if chat[-1]["role"] == "assistant" and not chat[-1].get("content"):
            conversation = replace(conversation, chat=chat[:-1])
        prompt = self._prompt(conversation).tokens.tolist()
        return prompt, [True] * len(prompt)

    def prompt_beside_image(self, prompt: str | Mapping[str, str]) -> Tokenized:
        """Returns the tokens of a prompt, ``{"image": path, "text": ...}`` or a text alone, for a model that takes images."""
        text, image = (prompt, None) if isinstance(prompt, str) else (prompt.get("text", ""), prompt.get("image"))
        parts = [{"type": "image"}] * (image is not None) + [{"type": "text", "text": text}]
        sources = [] if image is None else [str(Path(image).absolute())]
        chat: Any = [{"role": "user", "content": parts}]
        return self._prompt(Conversation(chat, [0.0], images=sources, image_folder=Path("/")))

    def _prompt(self, conversation: Conversation) -> Tokenized:
        """Returns the tokens of a conversation, and of the beginning of an answer to it. Raises SampleError."""
        images = self._processed(conversation)
        text = self._rendering(conversation).text(len(conversation.chat), True)
        tokens, _ = self._encoded(text, images)
        beside = None if images is None else self.images.inputs(tokens, images)
        return self._cut(Tokenized(tokens, np.full(len(tokens), -1), beside))

    def tokenize(self, conversation: Conversation) -> Tokenized:
        """Returns the tokens of a conversation, and the turn whose target each is.

        Raises SampleError, with the turn, if the template does not determine the targets, or a cut would lose an image.
        """
        trains = [weight > 0 for weight in conversation.weights]
        if self._train_on_last:
            answers = [i for i, message in enumerate(conversation.chat) if message["role"] == "assistant"]
            trains = [i in answers[-1:] for i in range(len(trains))]
        return self._tokenized(self._rendering(conversation), trains, self._processed(conversation))

    def tokenize_turns(self, conversation: Conversation, ends: Sequence[int]) -> Iterator[Tokenized]:
        """Yields the same as :meth:`tokenize` for the first ``end`` messages, of which only the last trains.

        Each is rendered, about once. What it shares with the longest is encoded once.
        """
        conversation = replace(conversation, chat=conversation.chat[: ends[-1]])
        rendering, encode = self._rendering(conversation), None
        if conversation.images is None:
            encode = self._encode_like(rendering.text(ends[-1]))
        else:  # opened once
            opened = [open_image(each, conversation.image_folder) for each in conversation.images]
            conversation = replace(conversation, images=opened)

        def tokenized(end: int) -> Tokenized:
            only = [i == end - 1 and conversation.weights[i] > 0 for i in range(end)]
            images = self._processed(replace(conversation, chat=conversation.chat[:end]))
            return self._tokenized(rendering, only, images, encode)

        longest = tokenized(ends[-1])  # first: others are compared to it
        for end in ends:
            yield tokenized(end) if end < ends[-1] else longest

    def _tokenized(
        self,
        rendering: Rendering,
        trains: Sequence[bool],
        images: ProcessedImages | None,
        encode: Callable[[str], Encoded] | None = None,
    ) -> Tokenized:
        """Returns what :meth:`tokenize` does for the first ``len(trains)`` messages."""
        if images is not None:
            encode = partial(self._encoded, images=images)
        tokens, turns = self._template.targets(rendering, trains, encode or self._encoded)
        if images is None:
            return self._cut(Tokenized(tokens, turns))
        num_printed = rendering.text(len(trains)).count(self.images.placeholder)
        if num_printed != len(images.texts):
            text = f"prints {num_printed} of its {len(images.texts)} images; train its texts alone, or change"
            raise SampleError(f"the chat template {text} chat_template.jinja")
        # An image stands in a turn that is not trained, and is in the sample as a whole.
        beside = self.images.inputs(tokens, images)
        are_images = beside.identities < 0
        if len(turn := turns[are_images & (turns >= 0)]):
            raise SampleError(
                f"turn {turn[0]} ({rendering.chat[turn[0]]['role']}): it has an image, and is trained; write images in users' turns"
            )
        return self._cut(Tokenized(tokens, turns, beside))

    def _cut(self, made: Tokenized) -> Tokenized:
        """Returns the first ``max_seq_len`` tokens. Raises SampleError if that would cut an image."""
        end, beside = self.max_seq_len, made.images
        if beside is not None:
            if end is not None and (num := beside.num_to_last) > end:
                text = f"it would cut an image, whose last token is {num - 1}; set it to at least {num + 1}, or smaller images"
                raise SampleError(f"tokenizer.max_seq_len={end}: {text}")
            beside = beside.at(np.arange(len(made.tokens[:end])))
        return Tokenized(made.tokens[:end], made.turns[:end], beside)

    def _processed(self, conversation: Conversation) -> ProcessedImages | None:
        """Returns the images of a conversation as the model takes them; None if it is of texts alone."""
        if conversation.images is None:
            return None
        num = num_images_in(conversation.chat)
        return self.images.processed(
            [open_image(each, conversation.image_folder) for each in conversation.images[:num]]
        )

    def _rendering(self, conversation: Conversation) -> Rendering:
        """Returns a conversation in the form that the template takes; raises SampleError if its texts cannot be trained."""
        if conversation.images is None and num_images_in(conversation.chat):
            raise SampleError("it has an image; set dataset to a conversation_dataset, which reads images")
        given = replace(conversation, variables={**self._variables, **conversation.variables})
        texts: dict[str, Any] = {f"turn {i} ({message['role']})": message for i, message in enumerate(given.chat)}
        for i, tool in enumerate(given.tools or ()):
            texts[f"tools[{i}] ({tool.get('function', tool)['name']})"] = tool
        for owner, value in {**texts, **given.variables}.items():
            self._check(json.dumps(value, ensure_ascii=False, default=str), f"{owner}: ")
        # What apply_chat_template makes of it, by a template that prints what it is given.
        if given.tools or given.variables or any(m.keys() - {"role", "content"} for m in given.chat):
            printer = f"{{{{ [{', '.join(['messages', 'tools', *given.variables])}] | tojson }}}}"
            options = {"chat_template": printer, "tokenize": False, **given.variables}
            new_chat, tools, *values = json.loads(
                self.tokenizer.apply_chat_template(given.chat, given.tools, **options)
            )
            # Of one value under several names, the row's name comes first.
            chat = [
                {**{k: new[k] for k in old if k in new}, **new} for old, new in zip(given.chat, new_chat, strict=True)
            ]
            given = replace(given, chat=chat, tools=tools, variables=dict(zip(given.variables, values, strict=True)))
        return self._template.fitted(given)

    def _check(self, text: str, owner: str = "") -> None:
        """Raises SampleError for a text that contains a special token, which would be trained, or half a character."""
        if special := self._special.search(text):
            raise SampleError(f"{owner}its text contains the special token {special[0]}; remove it")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = f"{text[error.start]!r}, half of a character (a lone surrogate)"
            raise SampleError(f"{owner}it contains {half}; remove it, or write the whole character") from None

    def _encoded(self, text: str, images: ProcessedImages | None = None) -> Encoded:
        places = None
        if images is not None:
            text, places = replaced(text, self.images.placeholder, images.texts)
        encoded = self._backend.encode(text, add_special_tokens=False)
        tokens = np.array(encoded.ids, dtype=np.int64)
        ends = np.fromiter((end for _, end in encoded.offsets), np.int64, len(tokens))
        return tokens, ends if places is None else places[ends]

    def _encode_like(self, known: str) -> Callable[[str], Encoded]:
        """Returns a function that encodes texts, from the last added token on that begins what differs from ``known``."""
        tokens, ends = self._encoded(known)
        cuts = np.flatnonzero(np.isin(tokens, [*self._separators]))
        longest = max(map(len, self._separators.values()), default=0)

        def encode(text: str) -> Encoded:
            num_cuts = np.searchsorted(ends[cuts], num_common(known, text) - longest, side="right")
            if text == known or num_cuts == 0:
                return (tokens, ends) if text == known else self._encoded(text)
            cut = cuts[num_cuts - 1]
            start = known.rindex(self._separators[tokens[cut]], 0, ends[cut])
            new_tokens, new_ends = self._encoded(text[start:])
            return np.append(tokens[:cut], new_tokens), np.append(ends[:cut], new_ends + start)

        return encode

    def _render(self, given: Conversation, num: int, prompt: bool = False) -> str:
        """Returns the text of the first messages, as ``apply_chat_template``, which copies all each time."""
        if self.tokenizer.chat_template is None:
            problem = "it has no chat template for messages; add a chat_template.jinja, or set dataset to a"
            raise SampleError(f"tokenizer.path={self._path}: {problem} text_completion_dataset")
        try:
            template = _compile_jinja_template(self.tokenizer.get_chat_template(tools=given.tools))
            values = {**self._constants, **given.variables, "tools": given.tools, "add_generation_prompt": prompt}
            context = template.new_context({**template.globals, **values, "messages": given.chat[:num]}, shared=True)
            text = "".join(template.root_render_func(context))
        except Exception as error:  # any: a template is a program
            raise SampleError(f"the chat template fails: {error}") from error
        if self._begin and not text.startswith(bos := self.tokenizer.bos_token):
            self._warn(f"the chat template does not print {bos}, which the tokenizer adds to other texts")
        return text


@cache
def _variables_of(source: str) -> frozenset[str]:
    """Returns names that a template reads before it sets them, as it is written."""

    def names(node: nodes.Node, own: frozenset[str] = frozenset()) -> Iterator[nodes.Name]:
        if isinstance(node, nodes.Name) and node.ctx != "param" and node.name not in own:
            yield node
        if isinstance(node, nodes.Macro | nodes.CallBlock):
            own |= {argument.name for argument in node.args}
        children = [*node.iter_child_nodes()]
        for child in reversed(children) if isinstance(node, nodes.Assign) else children:
            yield from names(child, own)

    try:
        tree = _compile_jinja_template(source).environment.parse(source)
    except TemplateError:  # reported with the first sample
        return frozenset()
    first = {name.name: name.ctx for name in reversed([*names(tree)])}
    return frozenset(name for name in find_undeclared_variables(tree) if first.get(name) == "load")
