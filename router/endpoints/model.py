"""The endpoints about the model: its card, and its tokenizer."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from protocol.errors import ModelNotFoundError
from router.access.gate import caller_of
from router.api.large.encoding import Entries, encoded
from router.api.shapes import LARGE_SIZE, Json
from router.api.tools.bodies import DetokenizeBody, TokenizeBody
from router.endpoints.reading import check_model, read_body, work_on_text
from router.service import Router


class ModelEndpoints:
    """GET /v1/models and /v1/models/{name}, POST /tokenize and /detokenize."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def models(self, request: Request) -> Response:
        """List the models that the caller may use."""
        cards = [self._card()] if caller_of(request.scope).may_use(self._router.facts.name) else []
        return JSONResponse({"object": "list", "data": cards})

    async def model(self, request: Request) -> Response:
        """Show the card of the model that the path names."""
        name = request.path_params["name"]
        if not name:
            raise ModelNotFoundError("give a model's name", param="model")
        check_model(self._router, request, name)
        return JSONResponse(self._card())

    async def tokenize(self, request: Request) -> Response:
        """Turn a text or a chat into token ids, as a prompt of it would be."""
        body, size = await read_body(self._router, request, TokenizeBody)
        check_model(self._router, request, body.model)
        body.check_together()
        content = await work_on_text(self._router, request, size, self._tokenized, body)
        return Response(content, media_type="application/json")

    async def detokenize(self, request: Request) -> Response:
        """Turn token ids into their text."""
        body, size = await read_body(self._router, request, DetokenizeBody)
        check_model(self._router, request, body.model)
        content = await work_on_text(self._router, request, size, self._detokenized, body)
        return Response(content, media_type="application/json")

    def _tokenized(self, body: TokenizeBody) -> bytes:
        """The answer to `tokenize`, encoded where the text was tokenized: a million ids would hold up the loop for 0.1 s."""
        tokens = self._tokens(body)
        answer = {"tokens": Entries(tokens), "count": len(tokens), "max_model_len": self._router.max_model_len}
        return encoded(answer, large=len(tokens) > LARGE_SIZE)

    def _detokenized(self, body: DetokenizeBody) -> bytes:
        """The answer to `detokenize`, encoded where its text was found. 65,536 ids may have eight million characters."""
        text = self._router.preparer.text(body.tokens)
        return encoded({"prompt": text}, large=len(text) > LARGE_SIZE)

    def _tokens(self, body: TokenizeBody) -> list[int]:
        preparer = self._router.preparer
        if body.messages is not None:
            tools = [tool.for_template() for tool in body.tools]
            return preparer.chat_tokens(body.messages, tools, preparer.template_options(body), over_context=True)
        assert body.prompt is not None
        return preparer.text_tokens(body.prompt, add_special_tokens=body.add_special_tokens is not False, over_context=True)

    def _card(self) -> Json:
        return {
            "id": self._router.facts.name,
            "object": "model",
            "created": self._router.started_at,
            "owned_by": "tandem",
            "max_model_len": self._router.max_model_len,
        }
