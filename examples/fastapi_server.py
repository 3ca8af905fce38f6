"""An HTTP endpoint that streams answers as server-sent events.

pip install fastapi uvicorn
uvicorn --app-dir examples fastapi_server:app
curl -N 'localhost:8000/answer?prompt=Why+is+the+sky+blue'
"""

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import StreamingResponse

from minipaged import Engine, EngineBusyError, InvalidRequestError, MinipagedError, SamplingParams, TokenStream


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """One engine for the life of the server; it serves all requests in shared batches."""
    async with Engine.load(os.environ.get("MODEL")) as engine:
        app.state.engine = engine
        yield


async def answer(request: Request, prompt: str, max_tokens: int = 200) -> StreamingResponse:
    """Answer a prompt. A client that disconnects ends its request in the engine."""
    engine: Engine = request.app.state.engine
    try:
        params = SamplingParams(temperature=0.2, max_tokens=max_tokens)
        stream = engine.chat([{"role": "user", "content": prompt}], params)
    except InvalidRequestError as error:
        raise HTTPException(status_code=400, detail=str(error)) from error
    except EngineBusyError as error:
        raise HTTPException(status_code=503, detail=str(error)) from error
    return StreamingResponse(events(stream), media_type="text/event-stream")


async def events(stream: TokenStream) -> AsyncIterator[str]:
    """One event per token; the last one says why it ended, or what went wrong."""
    try:
        async for token in stream:
            yield f"data: {json.dumps({'text': token.text, 'finish_reason': token.finish_reason})}\n\n"
    except MinipagedError as error:
        yield f"event: error\ndata: {json.dumps({'message': str(error)})}\n\n"


app = FastAPI(lifespan=lifespan)
app.add_api_route("/answer", answer)
