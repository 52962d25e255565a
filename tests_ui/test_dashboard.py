"""The dashboard in a real browser, of a real server: what a person does with it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conftest import EVIL, SERVE, SIZES, Running, tab, tailrace
from playwright.sync_api import Browser, expect

PAGES = {"overview": "#/", "requests": "#/requests", "steps": "#/steps", "shapes": "#/shapes", "cost": "#/cost?since=0",
         "playground": "#/playground"}  # fmt: skip
BACKGROUND = {"light": "rgb(255, 255, 255)", "dark": "rgb(18, 22, 28)"}


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("size", sorted(SIZES))
def test_every_page_fits_its_screen_in_light_and_dark(
    chromium: Browser, server: Running, size: str, theme: str
) -> None:
    with tab(chromium, server, viewport=SIZES[size], color_scheme=theme) as own:
        for name, place in PAGES.items():
            page = own.open(place)
            expect(page.locator(".page h1").first).to_be_visible()
            expect(page.locator("nav a[aria-current=page]")).to_have_count(1)
            assert page.evaluate("getComputedStyle(document.body).backgroundColor") == BACKGROUND[theme]
            wider = page.evaluate("document.documentElement.scrollWidth - innerWidth")
            assert wider <= 0, f"{name} is {wider} pixels too wide"
            own.picture(f"{name}-{size}-{theme}")


def test_the_switch_turns_the_light_off_and_that_is_remembered(chromium: Browser, server: Running) -> None:
    with tab(chromium, server, color_scheme="light") as own:
        page = own.open()
        page.get_by_role("button", name="Switch to dark").click()
        page.reload()
        page.get_by_role("button", name="Switch to light").wait_for()
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == BACKGROUND["dark"]


def test_from_the_list_to_a_waterfall_and_on_to_whoever_it_names(chromium: Browser, server: Running) -> None:
    with tab(chromium, server) as own:
        page = own.open("#/requests")
        rows = page.locator(".list a.row")
        expect(rows).to_have_count(3)
        expect(rows.nth(1)).to_contain_text(EVIL)  # as text
        rows.first.focus()
        page.keyboard.press("Enter")
        expect(page.locator(".waterfall li .phase")).to_contain_text(["prefill", "decode"])
        expect(page.locator(".words li").first).to_contain_text("It took")
        expect(page.locator(".chip.ok").first).to_contain_text("ok")
        shares = [float(bar.evaluate("e => parseFloat(e.style.width)")) for bar in page.locator(".track .bar").all()]
        assert sum(shares) == pytest.approx(100, abs=0.5)
        own.picture("request")


def test_a_request_is_found_by_its_id_and_an_unknown_one_is_said_to_be(chromium: Browser, server: Running) -> None:
    name = server.complete("Lakes are", **{"x-tailrace-workload": "chat"})
    with tab(chromium, server) as own:
        page = own.open("#/requests")
        page.get_by_label("Find").fill(name)
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", name=name)).to_be_visible()
        page = own.open("#/request/chatcmpl-nobody")
        expect(page.get_by_text("Nothing is known of chatcmpl-nobody.")).to_be_visible()
        assert own.faults
        own.faults = [fault for fault in own.faults if "404" not in fault]  # the browser tells of what was not found


def test_the_playground_answers_tells_what_it_saw_and_leads_to_the_waterfall(
    chromium: Browser, server: Running
) -> None:
    with tab(chromium, server) as own:
        page = own.open("#/playground")
        page.get_by_label("Most tokens").fill("12")
        page.get_by_label("Your message").fill("Name a river.")
        page.keyboard.press("Enter")
        answer = page.locator("li.assistant")
        expect(answer).to_contain_text(re.compile(r"TTFT \d.* a token · longest gap .* tokens, prompt \d+"))
        assert answer.locator(".text").inner_text().strip()
        own.picture("playground-answer")
        answer.get_by_role("link", name="where the time went").click()
        expect(page.locator(".waterfall li .phase")).to_contain_text(["prefill"])
        expect(page.get_by_text("workload playground")).to_be_visible()
        page.get_by_role("link", name="Playground").click()
        expect(page.locator("li.user .text")).to_have_text("Name a river.")  # it is still there


def test_stop_ends_an_answer_for_the_engine_too(chromium: Browser, server: Running) -> None:
    with tab(chromium, server) as own:
        page = own.open("#/playground")
        page.get_by_label("Most tokens").fill("2000")
        page.get_by_label("Temperature").fill("1")
        page.get_by_label("Your message").fill("Tell me everything about rivers, at length.")
        page.get_by_role("button", name="Send").click()
        expect(page.locator("li.assistant")).to_contain_text("TTFT")
        page.get_by_role("button", name="Stop").click()
        expect(page.locator("li.assistant")).to_contain_text("stopped")
        page.get_by_role("link", name="where the time went").click()
        expect(page.get_by_text("gone: abort")).to_be_visible()


def test_steps_show_who_was_in_them_with_the_arrow_keys(chromium: Browser, server: Running) -> None:
    with tab(chromium, server) as own:
        page = own.open("#/steps")
        page.get_by_label("Window").select_option("30")
        server.complete("Seas are")
        expect(page.get_by_text(re.compile(r"\d+ steps in 30 s"))).to_be_visible()
        page.locator("canvas").focus()
        page.keyboard.press("End")
        expect(page.locator("#step .who li")).to_contain_text(["token"])
        expect(page.get_by_role("button", name="Go on")).to_be_visible()
        own.picture("steps-chosen")


def test_a_cell_of_the_map_leads_to_its_requests(chromium: Browser, server: Running) -> None:
    with tab(chromium, server) as own:
        page = own.open("#/shapes")
        cell = page.locator(".map a").first
        cell.hover()
        expect(page.locator(".told")).to_contain_text("tokens in")
        cell.click()
        expect(page.get_by_text("Only shapes of")).to_be_visible()
        expect(page.locator(".list a.row").first).to_be_visible()


def test_cost_asks_for_a_price_where_none_is_known(chromium: Browser, server: Running) -> None:
    with tab(chromium, server) as own:
        page = own.open("#/cost?since=0")
        expect(page.get_by_text("What an hour of this machine costs is not known.")).to_be_visible()
        page.get_by_label("$ an hour").fill("3.6")
        page.get_by_role("button", name="Use").click()
        expect(page.get_by_text("as typed here")).to_be_visible()
        expect(page.locator("table")).to_contain_text(EVIL)
        own.picture("cost-price")


def test_the_ledger_alone_has_no_live_part_and_says_so(chromium: Browser, server: Running, ledger: Path) -> None:
    with tailrace("ui", "--ledger", f"sqlite:///{ledger}") as alone, tab(chromium, alone) as own:
        page = own.open()
        expect(page.get_by_text("Read from")).to_be_visible()
        expect(page.locator("nav a")).to_have_count(4)
        page.goto(f"{alone.root}/ui#/playground")
        expect(page.get_by_text("This needs a running server.")).to_be_visible()
        page.goto(f"{alone.root}/ui#/requests")
        page.locator(".list a.row").first.click()
        expect(page.locator(".words li").first).to_contain_text("It took")
        own.picture("alone")


def test_it_asks_for_a_key_and_keeps_it_in_the_tab_and_a_lost_server_is_said(
    chromium: Browser, server: Running, tmp_path: Path
) -> None:
    (tmp_path / "admin").write_text("the-admin-key\n")
    options = (*SERVE, "--ledger", str(tmp_path / "ledger.db"), "--admin-key-file", str(tmp_path / "admin"))
    with tailrace(*options) as keyed, tab(chromium, keyed) as own:
        page = own.page
        page.goto(f"{keyed.root}/ui")
        expect(page.get_by_role("dialog")).to_be_visible()
        page.get_by_label("API key").fill("wrong")
        page.keyboard.press("Enter")
        expect(page.get_by_role("dialog")).to_contain_text("not valid")
        page.get_by_label("API key").fill("the-admin-key")
        page.keyboard.press("Enter")
        expect(page.locator("#link")).to_have_text("live")
        page.reload()
        expect(page.locator("#link")).to_have_text("live")
        assert "the-admin-key" not in page.evaluate("JSON.stringify(localStorage)")
        page.goto(f"{keyed.root}/ui#/requests")
        expect(page.get_by_text("No requests yet.")).to_be_visible()
        own.picture("requests-none")
        port = int(keyed.root.rpartition(":")[2])
        keyed.stop()
        expect(page.locator("#banner")).to_contain_text("The connection to the server is lost")
        own.picture("lost")
        with tailrace(*options, port=port):
            expect(page.locator("#banner")).to_be_hidden()
            expect(page.locator("#link")).to_have_text("live")
            page.close()
        own.faults = [fault for fault in own.faults if "401" not in fault and "ERR_" not in fault]
