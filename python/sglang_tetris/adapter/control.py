"""Changing the budget of a running server.

    POST /tetris/budget {"draft_budget": "3x"}        16, "16", "3x", "auto"
    POST /set_internal_state {"server_args": {"tetris_budget": 16}}
    POST /set_internal_state {"server_args": {"tetris_drafts_per_request": 3}}

SGLang's own door takes numbers only; the first route takes what `--tetris-budget` takes
and sends it through that door. Both stand behind SGLang's admin key where there is one.
"""

from typing import Any

from sglang_tetris.core.config import BudgetSpec, parse_budget
from sglang_tetris.core.errors import TetrisConfigError

ROUTE = "/tetris/budget"
PER_STEP = "tetris_budget"
PER_REQUEST = "tetris_drafts_per_request"
# Stands for auto where only numbers pass.
AUTO = -1


def to_numbers(spec: BudgetSpec) -> dict[str, int]:
    """Return a budget as SGLang's numeric key and value."""
    if spec.mode == "auto":
        return {PER_STEP: AUTO}
    return {PER_REQUEST if spec.mode == "mean" else PER_STEP: spec.value}


def from_number(key: str, value: Any) -> BudgetSpec:
    """Return the budget that a numeric key and value stand for; ValueError if none."""
    if key == PER_REQUEST:
        return parse_budget(f"{value}x")
    return BudgetSpec("auto") if value == AUTO else parse_budget(value)


def add_route() -> None:
    """Add the budget's route to SGLang's HTTP server; again changes nothing."""
    from fastapi import Body
    from fastapi.responses import ORJSONResponse
    from sglang.srt.entrypoints import http_server
    from sglang.srt.managers.io_struct import SetInternalStateReq
    from sglang.srt.utils.auth import AuthLevel, auth_level

    if any(getattr(route, "path", None) == ROUTE for route in http_server.app.routes):
        return

    @http_server.app.post(ROUTE)
    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def set_tetris_budget(draft_budget: str | int = Body(embed=True)) -> Any:
        try:
            spec = parse_budget(draft_budget)
        except TetrisConfigError as error:
            return ORJSONResponse({"error": {"message": str(error)}}, status_code=400)
        manager = http_server.get_global_state().tokenizer_manager
        updated = await manager.set_internal_state(
            SetInternalStateReq(server_args=to_numbers(spec))
        )
        return {"draft_budget": str(spec), "updated": all(updated)}
