"""The web application: pages, live events, metrics, and actions of people who may act."""

import asyncio
import logging
import resource
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import parse_qs

from anyio import to_thread
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import (
    HTMLResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from buildlib.error_base import QnnfarmError
from harness.errors import NotStoredError, UnknownMemberError
from harness.results.alerts import AlertState, review_new, set_state
from harness.results.store import ResultsStore
from harness.words import pluralize
from plugins.lab.jobs import LabJobs
from plugins.lab.page.access import COOKIE, Access, is_same_origin
from plugins.lab.page.board import Board, BoardReader
from plugins.lab.page.metrics import CONTENT_TYPE, render_metrics
from plugins.lab.page.view import View, read_own, read_style, render_page, render_sign_in
from reports.html_file import SITE_POLICY

log = logging.getLogger("qnnfarm.lab")

_INTERVAL_S = 0.5
_KEEP_ALIVE_S = 15.0
_MOST_LISTENERS = 1000
_LONGEST_BODY = 4096
_SILENT_S = 10.0
"""So long a request may take to arrive."""
_MOST_CONNECTIONS = 500
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_REPORT_POLICY = f"{SITE_POLICY.replace(' file:', '')}; base-uri 'none'; frame-ancestors 'none'"
_HEADERS = {
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Content-Security-Policy": _POLICY,
}


def make_app(
    reader: BoardReader, access: Access, hosts: Sequence[str], ends: Callable[[], bool]
) -> Starlette:
    """Make the application.

    Args:
        reader: closed with it.
        hosts: names under which the page is asked for; any other is refused, so that no foreign
            site's name can be made to lead here.
        ends: whether the server is about to end, which open pages would put off.
    """
    lab = _Endpoints(reader, access, ends)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await to_thread.run_sync(reader.close)

    return Starlette(
        routes=[
            Route("/", lab.page),
            Route("/events", lab.events),
            Route("/lab.css", lab.asset(read_style, "text/css")),
            Route("/lab.js", lab.asset(lambda: read_own("lab.js"), "text/javascript")),
            Route("/metrics", lab.metrics),
            Route(
                "/grafana.json",
                lab.asset(lambda: read_own("grafana.json"), "application/json"),
            ),
            Route("/report/{name:path}", lab.report),
            Route("/sign-in", lab.sign_in, methods=["GET", "POST"]),
            *(Route(path, lab.acting(act), methods=["POST"]) for path, act in _ACTIONS.items()),
        ],
        middleware=[
            Middleware(_Headers),
            Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts), www_redirect=False),
        ],
        lifespan=lifespan,
    )


class _Endpoints:
    """Endpoints over one reader, which all pages share: a hundred cost one reading."""

    def __init__(self, reader: BoardReader, access: Access, ends: Callable[[], bool]) -> None:
        self._reader = reader
        self._access = access
        self._ends = ends
        self._reading = asyncio.Lock()
        self._board: Board | None = None
        self._view = View({}, ())
        self._listeners = 0

    async def page(self, request: Request) -> Response:
        """The page."""
        _, view = await self._look()
        user = self._access.user(request)
        html = render_page(view, user=user, acts=bool(user), signs_in=self._access.signs_in)
        return HTMLResponse(html)

    async def events(self, request: Request) -> Response:
        """Send changes as server-sent events; first all, unless the page shows it already."""
        if self._listeners >= _MOST_LISTENERS:
            return PlainTextResponse("too many pages are open", 503)
        digest = request.query_params.get("view", "")
        return StreamingResponse(self._changes(digest), media_type="text/event-stream")

    async def metrics(self, _: Request) -> Response:
        """Metrics for Prometheus."""
        board, _view = await self._look()
        return Response(render_metrics(board), media_type=CONTENT_TYPE)

    def asset(self, read: Callable[[], str], kind: str) -> Callable[[Request], Awaitable[Response]]:
        """Make an endpoint of a file of ours."""

        async def serve(_: Request) -> Response:
            return Response(read(), media_type=kind)

        return serve

    async def report(self, request: Request) -> Response:
        """A file of the report's site, or the page of a run."""
        name = request.path_params["name"] or "index.html"
        board, _ = await self._look()
        content = board.report.files.get(name)
        if content is None and name.startswith("runs/") and name.endswith(".html"):
            run_id = name.removeprefix("runs/").removesuffix(".html")
            try:
                content = await to_thread.run_sync(self._reader.run_page, run_id)
            except NotStoredError as error:
                return PlainTextResponse(f"{error}\n", 404)
            except QnnfarmError as error:
                return PlainTextResponse(f"{error}\n", 503)
        if content is None and not board.report.files and name == "index.html":
            return RedirectResponse(request.url_for("page"))
        if content is None:
            return PlainTextResponse(f"there is no {name[:80]}\n", 404)
        kinds = {"css": "text/css", "js": "text/javascript", "html": "text/html"}
        kind = kinds[name.rpartition(".")[2]]
        return Response(
            content, media_type=kind, headers={"Content-Security-Policy": _REPORT_POLICY}
        )

    async def sign_in(self, request: Request) -> Response:
        """The form that asks for a token, and its answer."""
        if not self._access.signs_in:
            return PlainTextResponse("no tokens: start `qnnfarm serve` with --tokens FILE\n", 404)
        if request.method == "GET":
            return HTMLResponse(render_sign_in(""))
        if not is_same_origin(request):
            return PlainTextResponse("this form was sent by another site\n", 403)
        session = self._access.sign_in((await _form(request)).get("token", ""))
        if session is None:
            await asyncio.sleep(1.0)
            return HTMLResponse(render_sign_in("This is nobody's token."), 403)
        response = RedirectResponse(".", 303)
        secure = request.url.scheme == "https"
        response.set_cookie(COOKIE, session, httponly=True, samesite="strict", secure=secure)
        return response

    def acting(self, action: "Action") -> Callable[[Request], Awaitable[Response]]:
        """Make an endpoint of an action, for those who may act."""

        async def act(request: Request) -> Response:
            user = self._access.user(request)
            if not user:
                return PlainTextResponse("sign in to act\n", 401)
            if not is_same_origin(request):
                return PlainTextResponse("this request was sent by another site\n", 403)
            name, form = request.path_params["name"], await _form(request)
            try:
                words = await to_thread.run_sync(action, self._reader, name, form, user)
            except (UnknownMemberError, NotStoredError) as error:
                return PlainTextResponse(f"{error}\n", 404)
            except QnnfarmError as error:
                return PlainTextResponse(f"{error}\n", 409)
            log.warning("%s: %s", user, words)
            return PlainTextResponse(f"{words}\n")

        return act

    async def _look(self) -> tuple[Board, View]:
        """Return the lab as it is, at most so old as a reading is good for."""
        async with self._reading:
            board = self._board
            if board is None or time.time() - board.at >= _INTERVAL_S:
                board = await to_thread.run_sync(self._reader.read)
                view = View.of(board)
                if view != self._view:
                    self._view = view
                self._board = board
            return board, self._view

    async def _changes(self, shown: str) -> AsyncIterator[str]:
        self._listeners += 1
        try:
            _, view = await self._look()
            before = view if view.digest == shown else None
            sent_at = time.monotonic()
            yield "retry: 2000\n\n"
            while not self._ends():
                _, view = await self._look()
                news = view.since(before) if view is not before else ""
                before = view
                if news or time.monotonic() - sent_at > _KEEP_ALIVE_S:
                    yield f"data: {news}\n\n" if news else ": still here\n\n"
                    sent_at = time.monotonic()
                await asyncio.sleep(_INTERVAL_S)
        finally:
            self._listeners -= 1


Form = Mapping[str, str]
Action = Callable[[BoardReader, str, Form, str], str]
"""Does something to the device or alert of a name for a user, and says what it did."""


def _release(reader: BoardReader, name: str, form: Form, user: str) -> str:
    token = form.get("token", "")
    lease = int(token) if token.isdecimal() else None
    is_released = reader.pool.admin.release(name, token=lease, by=user)
    return f"released {name}" if is_released else f"{name} was not held by that lease any more"


def _drain(reader: BoardReader, name: str, form: Form, user: str) -> str:
    return f"{name} is {reader.pool.admin.drain(name, form.get('reason', ''), by=user)}"


def _undrain(reader: BoardReader, name: str, _: Form, user: str) -> str:
    return f"{name} is {reader.pool.admin.undrain(name, by=user)}"


def _settle(state: AlertState) -> Action:
    def settle(reader: BoardReader, alert: str, form: Form, user: str) -> str:
        note = " ".join(filter(None, (form.get("note", ""), f"({user})")))
        with ResultsStore.open_existing(reader.location) as store:
            review_new(store)  # the page shows alerts that nobody has reviewed yet
            alerts = set_state(store, [alert], state, note=note)
        reader.compose_again()
        return f"alert {alerts[0].id} is {state}"

    return settle


def _cancel(reader: BoardReader, plan_run: str, _: Form, __: str) -> str:
    with LabJobs(reader.location) as jobs:
        return f"{pluralize(jobs.cancel(plan_run), 'cell')} of plan run {plan_run} cancelled"


_ACTIONS: Mapping[str, Action] = {
    "/devices/{name}/release": _release,
    "/devices/{name}/drain": _drain,
    "/devices/{name}/undrain": _undrain,
    "/plans/{name}/cancel": _cancel,
    "/alerts/{name}/acknowledge": _settle("acknowledged"),
    "/alerts/{name}/fix": _settle("fixed"),
    "/alerts/{name}/expect": _settle("expected"),
}


async def _form(request: Request) -> Form:
    """Read a small form; one that is too large, too slow, or of too many fields is empty."""
    body = b""
    try:
        async with asyncio.timeout(_SILENT_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > _LONGEST_BODY:
                    return {}
        fields = parse_qs(body.decode("utf-8", "replace"), max_num_fields=10)
    except (ValueError, TimeoutError):
        return {}
    return {name: values[-1] for name, values in fields.items()}


def most_connections() -> int:
    """Return how many connections the page takes at once: at most half of its descriptors."""
    return min(_MOST_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)


class BoundedConnection(H11Protocol):
    """A connection that is closed where its first request does not come, or too many are open."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        if len(self.connections) > most_connections():
            transport.abort()
        self._timer = self.loop.call_later(_SILENT_S, self._close_silent)

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def _close_silent(self) -> None:
        cycle: Any = self.cycle
        if cycle is None:
            self.transport.abort()


class _Headers:
    """Adds the headers that keep other sites' pages out, where a response has none of its own."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await self._app(scope, receive, send_with_headers)
