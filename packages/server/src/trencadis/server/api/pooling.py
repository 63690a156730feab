"""The bodies of requests for embeddings and scores, and of their responses.

``/v1/embeddings`` is OpenAI's, scores are vLLM's, and ``rerank`` is that of Jina, Cohere and vLLM.
Types are strict, and fields that are not supported are rejected, as in `protocol`.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from openai.types.completion_usage import PromptTokensDetails
from pydantic import (
    BaseModel,
    Field,
    PlainValidator,
    PrivateAttr,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError
from typing_extensions import Self

from trencadis.engine import InvalidRequest
from trencadis.server.api.characters import Text, check_characters
from trencadis.server.api.chat_messages import ChatMessage
from trencadis.server.api.protocol import (
    MAX_MESSAGES,
    ChatCompletionRequest,
    Priority,
    RequestBody,
    TemplateArguments,
    as_prompts,
    check_truncation,
)
from trencadis.server.api.translation import chat_request
from trencadis.server.api.unsupported_fields import UNSUPPORTED_POOLING, refuse_unsupported

MAX_INPUTS = 2048
"""Most inputs of one request: the OpenAI API's limit."""

_PAIRS = (
    ("text_1", "text_2"),
    ("queries", "documents"),
    ("queries", "items"),
    ("data_1", "data_2"),
)
"""The names that vLLM has given to the two sides of a score."""


def _inputs(value: Any, info: ValidationInfo) -> list[str | list[int]] | None:
    """The inputs to embed; None beside messages, which come in place of them."""
    if value is None:
        if info.data.get("messages") is None:
            raise PydanticCustomError("missing", "input or messages are required")
        return None
    return as_prompts(value, MAX_INPUTS, "inputs")


def _texts(value: Any) -> list[str]:
    """A text or a list of texts, as a list."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not value:
        raise InvalidRequest("must be a text or a list of texts")
    if len(value) > MAX_INPUTS:
        raise InvalidRequest(f"holds {len(value)} texts, at most {MAX_INPUTS} may be sent")
    return [_text(each) for each in value]


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidRequest("must be text: images and other parts are not supported")
    return check_characters(value)


def _documents(value: Any) -> list[str]:
    """Texts, or objects with a ``text``."""
    if isinstance(value, list):
        value = [_text_of(each) if isinstance(each, dict) else each for each in value]
    return _texts(value)


def _text_of(document: dict[str, Any]) -> Any:
    if "text" not in document:
        raise InvalidRequest(
            "must be texts, or objects with a text: images and other parts are not supported"
        )
    return document["text"]


Number: TypeAlias = float
"""For a class with a field ``float``."""

Texts = Annotated[list[str], PlainValidator(_texts, str | list[str])]


class Document(BaseModel):
    """A document of a request to rerank that is not plain text."""

    text: str


Documents = Annotated[list[str], PlainValidator(_documents, list[str | Document])]


EmbeddingType = Literal["float", "base64", "binary", "ubinary"]
"""How Cohere's API writes embeddings: numbers, their float32 in little endian, or the signs of
eight numbers as the bits of an integer, which is signed or not."""


class PoolingBody(RequestBody):
    """The fields that requests for embeddings and scores share.

    ``id_prefix`` begins the id of a response.
    """

    id_prefix: ClassVar[str]

    priority: Priority | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = Field(
        default=None,
        ge=-1,
        le=2**31 - 1,
        description="Longer inputs are cut at their end to so many tokens; -1: to the model's "
        "context. By default they are an error.",
    )

    @model_validator(mode="after")
    def _check_supported(self) -> Self:
        refuse_unsupported(self.model_extra or {}, UNSUPPORTED_POOLING)
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequest(
                "truncate_prompt_tokens is 0: leave at least one token", "truncate_prompt_tokens"
            )
        return self

    def kept_tokens(self, max_model_len: int) -> int | None:
        """How many tokens of an input are kept; None: longer ones are an error.

        Raises `InvalidRequest` for more than the model's context.
        """
        asked = self.truncate_prompt_tokens
        if asked is not None:
            check_truncation(asked, max_model_len)
        return max_model_len if asked == -1 else asked

    @property
    def keeps_end(self) -> bool:
        """Whether a longer input is cut at its beginning."""
        return False

    @abstractmethod
    def named_inputs(self) -> dict[str, str | list[int]]:
        """The inputs to embed, by the names under which the client knows them."""

    @property
    def text_prompt(self) -> str | None:
        """The name of the model's prompt that is put before each text; None for its default."""
        return None

    def conversation(self) -> ChatCompletionRequest | None:
        """What is to be embedded in place of inputs, if it is a conversation.

        Raises `ValidationError`.
        """
        return None

    @property
    def uses_activation(self) -> bool:
        """Whether embeddings have length 1, and scores are from 0 to 1."""
        return True

    def check_embeddings(self, embedding_size: int) -> None:
        """Raise `InvalidRequest` where embeddings of so many numbers cannot answer the request."""


class PairRequest(PoolingBody):
    """The fields that requests for scores share. Those here are for models that read both texts.

    Of other models a score is the cosine of two embeddings, and a field with an effect is rejected.
    """

    instruction: Text | None = Field(
        default=None,
        description="What makes a document relevant, of models that were trained with it.",
    )
    chat_template_kwargs: TemplateArguments | None = Field(
        default=None, description="Further arguments of the chat template that makes the prompt."
    )
    use_activation: bool | None = Field(
        default=None, description="False: scores are logits. By default they are from 0 to 1."
    )

    def check_embeddings(self, embedding_size: int) -> None:
        del embedding_size
        if self.instruction is not None or self.chat_template_kwargs:
            name = "chat_template_kwargs" if self.instruction is None else "instruction"
            raise InvalidRequest(
                f"{name} is for models that read query and document together, and this one "
                "compares their embeddings: write the instruction into the query",
                name,
            )
        if self.use_activation is False:
            raise InvalidRequest(
                "use_activation cannot be false: the scores of this model are cosines of "
                "embeddings, which have no activation",
                "use_activation",
            )

    @property
    def uses_activation(self) -> bool:
        return self.use_activation is not False

    @abstractmethod
    def pairs(self) -> dict[str, tuple[str, str]]:
        """Queries with their documents, by the names of the latter in the request."""


class EmbeddingRequest(PoolingBody):
    """``POST /v1/embeddings``."""

    id_prefix: ClassVar[str] = "embd"

    messages: (
        Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
        | None
    ) = Field(
        default=None,
        description="A conversation in place of input: one embedding, of what the chat template "
        "makes of it.",
    )
    input: Annotated[
        list[str | list[int]] | None,
        PlainValidator(_inputs, str | list[str] | list[int] | list[list[int]] | None),
    ] = Field(default=None, validate_default=True)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateArguments | None = None
    use_activation: bool | None = Field(
        default=None,
        description="False: embeddings are the hidden states, of any length. By default they have "
        "length 1.",
    )
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(
        default=None,
        ge=1,
        le=2**31 - 1,
        description="The first so many numbers, normalised again. Only models that were trained "
        "for it (Matryoshka) keep their quality.",
    )
    prompt_name: Text | None = Field(
        default=None,
        description="Which of the prompts that the checkpoint declares is put before each text, as "
        "query; by default the one that it declares as default, if any.",
    )

    truncation_side: Literal["left", "right"] | None = Field(
        default=None,
        description="Where truncate_prompt_tokens cuts: right, the default, or left.",
    )

    @property
    def keeps_end(self) -> bool:
        return self.truncation_side == "left"

    @model_validator(mode="after")
    def _check_input(self) -> Self:
        if self.input is not None and self.messages is not None:
            raise InvalidRequest(
                "input and messages exclude each other: send one of them", "messages"
            )
        return self

    @model_validator(mode="after")
    def _check_truncation(self) -> Self:
        if self.keeps_end and self.truncate_prompt_tokens is None:
            raise InvalidRequest(
                "truncation_side needs truncate_prompt_tokens, which says how much is kept",
                "truncation_side",
            )
        return self

    @model_validator(mode="after")
    def _check_prompt_name(self) -> Self:
        inputs = self.input or [[]]
        if self.prompt_name is not None and not all(isinstance(each, str) for each in inputs):
            raise InvalidRequest(
                "prompt_name names what is put before texts, and token ids stay unchanged, as do "
                "conversations: leave it out, or send texts",
                "prompt_name",
            )
        return self

    @property
    def text_prompt(self) -> str | None:
        return self.prompt_name

    @property
    def uses_activation(self) -> bool:
        return self.use_activation is not False

    def named_inputs(self) -> dict[str, str | list[int]]:
        return {f"input[{number}]": each for number, each in enumerate(self.input or ())}

    def conversation(self) -> ChatCompletionRequest | None:
        if self.messages is None:
            return None
        continues = self.continue_final_message
        return chat_request(
            messages=self.messages,
            add_generation_prompt=bool(self.add_generation_prompt),
            continue_final_message=continues,
            chat_template_kwargs=self.chat_template_kwargs,
        )

    def check_embeddings(self, embedding_size: int) -> None:
        if self.dimensions is not None and self.dimensions > embedding_size:
            raise InvalidRequest(
                f"dimensions {self.dimensions} is above the {embedding_size} numbers of this "
                "model's embeddings",
                "dimensions",
            )


class VectorRequest(EmbeddingRequest):
    """``POST /pooling`` of vLLM: embeddings or, of a model that scores, the score of each input."""

    id_prefix: ClassVar[str] = "pool"

    task: Literal["embed", "classify"] | None = None


class CohereEmbedRequest(PoolingBody):
    """``POST /v2/embed`` of Cohere's API, for texts.

    ``input_type``: the prompt of the checkpoint that is put before each text, as in vLLM.
    """

    id_prefix: ClassVar[str] = "embd"

    texts: Texts
    input_type: Text | None = None
    embedding_types: list[EmbeddingType] | None = Field(default=None, max_length=8)
    output_dimension: int | None = Field(
        default=None, ge=1, le=2**31 - 1, description="As dimensions of /v1/embeddings."
    )
    truncate: Literal["NONE", "START", "END"] | None = Field(
        default=None,
        description="Where longer texts are cut: END, the default, or START; NONE: they are an "
        "error.",
    )
    max_tokens: int | None = Field(
        default=None, ge=1, le=2**31 - 1, description="So many tokens of a text are kept."
    )

    @property
    def text_prompt(self) -> str | None:
        return self.input_type

    @property
    def keeps_end(self) -> bool:
        return self.truncate == "START"

    def kept_tokens(self, max_model_len: int) -> int | None:
        if self.truncate == "NONE":
            return None
        return min(self.max_tokens or max_model_len, max_model_len)

    def named_inputs(self) -> dict[str, str | list[int]]:
        return {f"texts[{number}]": each for number, each in enumerate(self.texts)}

    def check_embeddings(self, embedding_size: int) -> None:
        size = self.output_dimension or embedding_size
        if size > embedding_size:
            raise InvalidRequest(
                f"output_dimension {size} is above the {embedding_size} numbers of this model's "
                "embeddings",
                "output_dimension",
            )
        if size % 8 and {"binary", "ubinary"} & set(self.embedding_types or ()):
            raise InvalidRequest(
                f"binary embeddings have 8 numbers in a byte, and these have {size}: ask for a "
                "multiple of 8 with output_dimension",
                "embedding_types",
            )


class ScoreRequest(PairRequest):
    """``POST /v1/score``: one text and several, or as many on both sides."""

    id_prefix: ClassVar[str] = "score"

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None
    _names: tuple[str, str] = PrivateAttr(default=_PAIRS[0])

    @model_validator(mode="after")
    def _check_pair(self) -> Self:
        names = dict.fromkeys(name for pair in _PAIRS for name in pair)
        given = [name for name in names if getattr(self, name) is not None]
        if tuple(given) not in _PAIRS:
            listed = ", or ".join(" and ".join(pair) for pair in _PAIRS)
            raise InvalidRequest(f"a score needs {listed}", given[0] if given else "text_1")
        self._names = (given[0], given[1])
        first, second = self.sides
        if len(first) not in (1, len(second)):
            raise InvalidRequest(
                f"{given[0]} has {len(first)} texts and {given[1]} {len(second)}: give one, or as "
                "many as there",
                given[0],
            )
        return self

    @property
    def sides(self) -> tuple[list[str], list[str]]:
        """The texts of both sides."""
        first, second = (getattr(self, name) for name in self._names)
        return first, second

    def pairs(self) -> dict[str, tuple[str, str]]:
        """As above, the first side as queries."""
        first, second = self.sides
        queries = first * len(second) if len(first) == 1 else first
        return {
            f"{self._names[1]}[{number}]": pair
            for number, pair in enumerate(zip(queries, second, strict=True))
        }

    def named_inputs(self) -> dict[str, str | list[int]]:
        """As above, the first side first."""
        return {
            f"{name}[{number}]": text
            for name, texts in zip(self._names, self.sides, strict=True)
            for number, text in enumerate(texts)
        }


class RerankRequest(PairRequest):
    """``POST /v1/rerank``."""

    id_prefix: ClassVar[str] = "rerank"

    query: Annotated[str, PlainValidator(_text, str)]
    documents: Documents
    top_n: int | None = Field(
        default=None, ge=0, le=2**31 - 1, description="How many results; 0: all, the default."
    )
    return_documents: bool | None = Field(
        default=None, description="Whether results repeat their documents; the default is true."
    )

    max_tokens_per_doc: int | None = Field(
        default=None,
        le=2**31 - 1,
        description="Of each document so many first tokens are read; 0: all, the default.",
    )

    @model_validator(mode="after")
    def _check_tokens_per_document(self) -> Self:
        if self.max_tokens_per_doc is not None and self.max_tokens_per_doc < 0:
            raise InvalidRequest(
                f"max_tokens_per_doc must be a non-negative integer, got {self.max_tokens_per_doc}",
                "max_tokens_per_doc",
            )
        return self

    def with_documents(self, texts: list[str]) -> RerankRequest:
        """This request with other texts in place of its documents."""
        return self.model_copy(update={"documents": texts})

    def pairs(self) -> dict[str, tuple[str, str]]:
        """As above."""
        return {
            f"documents[{number}]": (self.query, text) for number, text in enumerate(self.documents)
        }

    def named_inputs(self) -> dict[str, str | list[int]]:
        """As above, the query first."""
        documents = {f"documents[{number}]": text for number, text in enumerate(self.documents)}
        return {"query": self.query, **documents}


class PoolingUsage(BaseModel):
    """Token counts of a request; nothing is generated."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class EmbeddingObject(BaseModel):
    """An embedding: numbers, or with ``base64`` their float32 in little endian."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(BaseModel):
    """The response of ``/v1/embeddings``, in the order of the inputs."""

    object: Literal["list"]
    data: list[EmbeddingObject]
    model: str
    usage: PoolingUsage


class ScoreObject(BaseModel):
    """The score of a pair, or the cosine of two embeddings."""

    object: Literal["score"]
    index: int
    score: float


class ScoreList(BaseModel):
    """The response of ``/v1/score``."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ScoreObject]
    usage: PoolingUsage


class VectorObject(BaseModel):
    """What the pooler computed of an input."""

    object: Literal["pooling"]
    index: int
    data: list[float] | str


class VectorList(BaseModel):
    """The response of ``/pooling``, in the order of the inputs."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[VectorObject]
    usage: PoolingUsage


class CohereEmbeddings(BaseModel):
    """The embeddings in each form that was asked for."""

    float: list[list[Number]] | None = None
    base64: list[str] | None = None
    binary: list[list[int]] | None = None
    ubinary: list[list[int]] | None = None


class CohereEmbedResponse(BaseModel):
    """The response of ``/v2/embed``, in the order of the texts."""

    id: str
    embeddings: CohereEmbeddings
    texts: list[str]
    meta: dict[str, Any]
    response_type: Literal["embeddings_by_type"]


class RerankResult(BaseModel):
    """A document, by its number in the request, and its score."""

    index: int
    relevance_score: float
    document: Document | None = None


class RerankList(BaseModel):
    """The response of ``/v1/rerank``, the most relevant document first."""

    id: str
    model: str
    results: list[RerankResult]
    usage: PoolingUsage
