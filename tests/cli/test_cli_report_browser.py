"""The report's page in a real browser: drawn without errors and without a network, and it answers to its controls."""

import os
import shutil
import time

import pytest
from report_folders import write_evaluated, write_sweep

sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install -e '.[test]'")
NAMES = ("chromium", "chromium-browser", "google-chrome")
EVIL = "<img src=http://127.0.0.1:9/x onerror=alert(1)></script>"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser():
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(f"needs a browser: none of {', '.join(NAMES)} is installed")
    # WebGL in software, as there is no GPU; and no sandbox for root, who has none in a container.
    given = ["--enable-unsafe-swiftshader", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=given)
        yield browser
        browser.close()


@pytest.fixture
def shown(browser):
    """Opens a page; in the end nothing may have gone wrong or been asked of a network."""
    wrong, contexts = [], []

    def open_page(page_file, width=1280, touch=False, look="light"):
        screen = {"viewport": {"width": width, "height": 900}, "color_scheme": look}
        context = browser.new_context(**screen, has_touch=touch, is_mobile=touch)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda asked: wrong.append(asked.url) if asked.url.startswith(("http", "ws")) else None)
        start = time.perf_counter()
        page.goto(page_file.as_uri())
        loaded = time.perf_counter() - start
        page.wait_for_selector("body[data-drawn=yes]", timeout=120_000)
        drawn = time.perf_counter() - start
        print(f"{page_file.stat().st_size / 1e6:.2f} MB, loaded in {loaded:.2f} s, drawn in {drawn:.2f} s")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert wrong == []


@pytest.fixture
def opened(shown, run):
    """Makes the page of a folder or of several, and opens it."""

    def open_folder(folder, width=1280, **screen):
        several = folder if isinstance(folder, list) else [folder]
        assert run("report", *several).exit_code == 0
        return shown(several[0] / ("report.html" if len(several) == 1 else "compared.html"), width, **screen)

    return open_folder


@pytest.fixture(scope="module")
def gallery(run, tmp_path_factory, pytestconfig):
    """The page of all studies of the project, which takes as long to make as all else here."""
    page = tmp_path_factory.mktemp("gallery") / "page.html"
    assert run("report", pytestconfig.rootpath / "studies", "--out", page).exit_code == 0
    return page


def sizes(page, selector):
    """Width and height of the largest element of every figure that fits."""
    return page.evaluate(
        """(selector) => [...document.querySelectorAll("figure")].map((figure) => {
            const boxes = [...figure.querySelectorAll(selector)].map((each) => each.getBoundingClientRect());
            return [Math.max(0, ...boxes.map((box) => box.width)), Math.max(0, ...boxes.map((box) => box.height))];
        })""",
        selector,
    )


def column(page, table, at):
    return page.locator(table).locator("tbody tr").evaluate_all(f"rows => rows.map(r => r.children[{at}].textContent)")


def lightness(page, selector, key):
    """Mean of red, green and blue, of 255, of every element's colour."""
    told = """(all, key) => all.map((each) => getComputedStyle(each)[key].match(/[0-9.]+/g).slice(0, 3).map(Number))"""
    colours = page.locator(selector).evaluate_all(told, key)
    assert colours
    return [sum(colour) / 3 for colour in colours]


def test_a_dark_page_has_light_text_everywhere(opened, tmp_path):
    for folder in (write_evaluated(tmp_path / "evaluated"), write_sweep(tmp_path / "swept")):
        for look, paper, text in (("light", (240, 256), (0, 120)), ("dark", (0, 60), (120, 256))):
            page = opened(folder, look=look)
            for selector, key, (low, high) in (
                ("body", "backgroundColor", paper),
                ("figure, th, td:first-child", "backgroundColor", paper),
                ("body, figcaption, td, th button, select", "color", text),
                ("svg.main-svg .xtick text, svg.main-svg .ytick text, svg.main-svg .legendtext", "fill", text),
            ):
                assert all(low <= shade < high for shade in lightness(page, selector, key)), (look, selector)


@pytest.mark.parametrize("width", [390, 1600])
def test_all_figures_are_drawn_on_every_screen(opened, tmp_path, width):
    for folder in (write_evaluated(tmp_path / "evaluated"), write_sweep(tmp_path / "swept")):
        page = opened(folder, width)
        assert all(across > 200 and down > 100 for across, down in sizes(page, "svg.main-svg"))
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.locator("text=could not be drawn").count() == 0
        buttons = page.locator(".modebar-btn").evaluate_all("each => each.map(button => button.dataset.title)")
        assert "Zoom" in buttons
        assert not [button for button in buttons if "hare" in button]  # nothing that sends a chart away


def test_no_buttons_lie_over_figures_where_nothing_hovers(opened, tmp_path):
    page = opened(write_evaluated(tmp_path / "evaluated"), 390, touch=True)
    assert page.locator(".legend").count() > 0
    assert page.locator(".modebar-btn").count() == 0


def test_the_gallery_is_of_a_sensible_size(gallery):
    assert gallery.stat().st_size < 15e6


def test_the_gallery_shows_every_picture_on_every_screen(shown, gallery, pytestconfig):
    page = shown(gallery)
    for width in (400, 1600):
        page.set_viewport_size({"width": width, "height": 900})
        page.reload()
        shown = page.evaluate("[...document.images].map((each) => [each.complete, each.naturalWidth, each.width])")
        assert len(shown) == len([*(pytestconfig.rootpath / "figures").glob("*.png")])
        assert all(complete and natural > 100 and across > 100 for complete, natural, across in shown)
        page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
        assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("width", [390, 1600])
def test_a_mesh_names_its_rows_columns_and_nodes(opened, tmp_path, width):
    page = opened(write_evaluated(tmp_path / "run", shape=(2, 3)), width)
    figure = page.locator("figure", has_text="Load of nodes and links")
    for panel in (figure.locator(".plot").nth(at) for at in (0, 1)):
        assert panel.locator(".xtitle").all_text_contents() == ["column"]
        assert panel.locator(".ytitle").all_text_contents() == ["row"]
        told = panel.locator(".textpoint").all_text_contents()
        places = [each.bounding_box() for each in panel.locator(".textpoint").all()]
        assert told == [str(node) for node in range(6)]
        rows = [round(place["y"]) for place in places]
        assert rows == [min(rows)] * 3 + [max(rows)] * 3  # of three columns: 0, 1, 2 above 3, 4, 5
        assert max(rows) - min(rows) > 20
        assert places[0]["x"] < places[1]["x"] < places[2]["x"]
    assert "Node 3 x row + column" in figure.locator("figcaption").text_content()


def test_a_network_of_no_mesh_has_no_axes(opened, tmp_path):
    page = opened(write_evaluated(tmp_path / "run"))
    figure = page.locator("figure", has_text="Load of nodes and links")
    assert figure.locator(".xtitle, .ytitle, .xtick, .ytick").count() == 0


def test_small_screens_scroll_what_they_cannot_show(opened, tmp_path):
    page = opened(write_evaluated(tmp_path / "run", exchanges=12), 390)
    figure = page.locator("figure", has_text="Under every exchange")
    plots = figure.locator(".plots")
    assert plots.evaluate("each => each.scrollWidth > each.clientWidth")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    sizes = figure.locator(".heatmap-label text").evaluate_all(
        "all => all.map(each => each.getBoundingClientRect().height)"
    )
    assert len(sizes) == 24
    assert min(sizes) >= 9
    table = page.locator("section:first-of-type .scroll").first
    table.evaluate("each => { each.scrollLeft = 200; }")
    name = table.locator("tbody td").first
    assert name.bounding_box()["x"] == pytest.approx(table.bounding_box()["x"], abs=1)  # names of rows stay in sight


def test_the_slider_moves_the_picture(opened, tmp_path):
    page = opened(write_evaluated(tmp_path / "run"))
    panels = page.locator("figure", has_text="Load of nodes and links").locator(".plot")
    colours = "plot => [...plot.data[1].marker.color]"
    assert [panels.nth(at).evaluate(colours) for at in (0, 1)] == [[10, 10], [4, 1]]
    before = panels.nth(1).screenshot()
    slider = page.locator("input[type=range]")
    slider.focus()
    page.keyboard.press("ArrowRight")
    assert page.locator(".slider output").text_content() == "layer 5"
    page.wait_for_timeout(300)
    assert [panels.nth(at).evaluate(colours) for at in (0, 1)] == [[10, 10], [2, 4]]
    assert panels.nth(1).screenshot() != before
    page.locator("figure", has_text="Load of nodes and links").locator("select").nth(1).select_option("tp")
    page.wait_for_timeout(300)
    assert panels.nth(1).evaluate(colours) == [10, 10]


def test_a_choice_changes_a_figure(opened, tmp_path):
    page = opened(write_evaluated(tmp_path / "run"))
    figure = page.locator("figure", has_text="Stages of every layer")
    heights = "plot => plot.data.map(trace => [...trace.y])"
    assert figure.locator(".plot").evaluate(heights) == [[5, 7], [4, 4], [2, 2]]
    figure.locator("select").select_option("tp")
    page.wait_for_timeout(300)
    assert figure.locator(".plot").evaluate(heights) == [[1, 3], [10, 10], [2, 2]]


def test_a_table_sorts_by_numbers_up_and_down(opened, tmp_path):
    page = opened(write_evaluated(tmp_path / "run"))
    table = "section:first-of-type table"
    compute = page.locator(table).locator("th", has_text="compute")
    at = compute.evaluate("head => head.cellIndex")
    assert column(page, table, at) == ["10.00", "4.00"]
    compute.locator("button").click()
    assert column(page, table, at) == ["4.00", "10.00"]
    assert compute.get_attribute("aria-sort") == "ascending"
    compute.locator("button").click()
    assert column(page, table, at) == ["10.00", "4.00"]
    page.locator(table).locator("th button").first.click()
    assert column(page, table, 0) == ["ep", "tp"]


def selected(page):
    return page.evaluate("""() => {
        const figure = [...document.querySelectorAll("figure")].find((each) => each.querySelector(".parallel"));
        const plane = figure.querySelector(".plot:not(.parallel)"), lines = figure.querySelector(".parallel");
        const traces = plane.data.filter((trace) => trace.mode === "markers");
        return {plane: traces.reduce((sum, trace) => sum + (trace.selectedpoints ?? trace.customdata).length, 0),
                lines: [...lines.data[0].line.color].filter((each) => each > 0).length,
                told: figure.querySelector("output").textContent,
                rows: figure.querySelectorAll("tbody tr").length};
    }""")


def test_a_box_in_the_plane_is_seen_in_the_parallel_coordinates(opened, tmp_path):
    page = opened(write_sweep(tmp_path / "run"))
    assert (selected(page)["plane"], selected(page)["lines"]) == (16, 16)
    box = page.locator("figure .plot:not(.parallel) .draglayer .nsewdrag").first.bounding_box()
    page.mouse.move(box["x"] + 2, box["y"] + 2)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + box["height"] - 2, steps=8)
    page.mouse.up()
    page.wait_for_timeout(1000)
    found = selected(page)
    assert 0 < found["lines"] == found["plane"] == found["rows"] < 16
    assert found["told"].startswith(f"{found['lines']} of 16 points are selected")
    page.locator("button", has_text="Select all").click()
    page.wait_for_timeout(1000)
    assert (selected(page)["plane"], selected(page)["lines"]) == (16, 16)


def test_a_range_in_the_parallel_coordinates_is_seen_in_the_plane(opened, tmp_path):
    page = opened(write_sweep(tmp_path / "run"))
    page.locator("figure .parallel").scroll_into_view_if_needed()
    axis = page.locator("figure .parallel .axis-brush").first.bounding_box()
    across = axis["x"] + axis["width"] / 2
    page.mouse.move(across, axis["y"] + axis["height"] * 0.2)
    page.mouse.down()
    page.mouse.move(across, axis["y"] + axis["height"] * 0.6, steps=8)
    page.mouse.up()
    page.wait_for_timeout(1000)
    found = selected(page)
    assert 0 < found["plane"] == found["rows"] < 16
    low, high = page.locator("figure .parallel").evaluate("plot => plot.data[0].dimensions[0].constraintrange")
    values = page.locator("figure .parallel").evaluate("plot => [...plot.data[0].dimensions[0].values]")
    assert found["plane"] == sum(low <= value <= high for value in values)


def test_the_plane_and_the_map_take_other_axes(opened, tmp_path):
    page = opened(write_sweep(tmp_path / "run"))
    title = "plot => plot.layout.xaxis.title.text"
    for name, label in (("Select in one", "utilisation"), ("Map of winners", "bandwidth [GB/s]")):
        figure = page.locator("figure", has_text=name)
        before = figure.locator(".plot").first.evaluate(title)
        figure.locator("select").first.select_option(index=1)
        page.wait_for_timeout(300)
        assert before != label
        assert figure.locator(".plot").first.evaluate(title) == label


def test_names_of_users_are_text(opened, tmp_path):
    for folder in (
        write_evaluated(tmp_path / "evaluated", (EVIL, "ep"), name=EVIL),
        write_sweep(tmp_path / "swept", names=(EVIL, "tp")),
    ):
        page = opened(folder)
        assert page.locator("img").count() == 0
        assert EVIL in page.content().replace("&lt;", "<").replace("&gt;", ">")
        legend = page.locator(".legendtext").all_text_contents()
        assert EVIL in legend


@pytest.mark.parametrize("width", [390, 1600])
def test_runs_stand_side_by_side_on_every_screen(opened, tmp_path, width):
    folders = [write_evaluated(tmp_path / name) for name in ("one", "a_run_whose_name_is_rather_long_for_a_phone")]
    page = opened(folders, width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    figure = page.locator("figure", has_text="Run by run")
    assert figure.locator(".xtitle").all_text_contents() == ["time [µs]"]
    assert figure.locator(".legendtext").all_text_contents() == [folder.name for folder in folders]
    assert figure.locator(".barlayer .point").count() == 4  # two strategies of two runs
