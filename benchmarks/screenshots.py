"""The pictures in the README and in docs/viewer.md, taken in Debian's Chromium, headless.

    make demo-virtual
    memtrace record --source none --virtual-gpu a100-40g -o demo-runs/served.memtrace -- tidekv \\
        serve-trace traces/mixed-150.jsonl --requests 60 --model llama-3.1-8b --device cuda \\
        --budget 4096 --schedule whole_prompt
    python benchmarks/screenshots.py [--into docs/images] [--width 1280] [--scheme light]
"""

import argparse
import shutil
from pathlib import Path

from playwright.sync_api import Page, sync_playwright
from viewer import serving

RUNS = Path("demo-runs")
PAIR = ("llama-snapkv", "llama-tidekv")
SERVED = ("served",)
#: Of each picture: its runs, the address that it shows, and how many pixels it is high.
PICTURES = {
    "overview": (PAIR, "", 830),
    "timeline": (PAIR, "timeline?by=layer", 860),
    "fragmentation": (PAIR, "fragmentation", 930),
    "requests": (SERVED, "requests?which=r0042", 1230),
}
_STILL = "() => !document.querySelector('[data-testid=stStatusWidget], [data-stale=true]')"


def take(page: Page, address: str, file: Path) -> None:
    """Open a page, wait until all is drawn, and keep what the window shows."""
    page.goto(address)
    page.locator(".js-plotly-plot .main-svg").first.wait_for()
    page.wait_for_function(_STILL)
    page.wait_for_timeout(2000)  # legends and titles find their places last
    page.mouse.move(0, 0)
    page.screenshot(path=file)
    print(f"{file}: {file.stat().st_size / 1024:.0f} KiB")


def main() -> None:
    """Take the pictures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--into", type=Path, default=Path("docs/images"))
    parser.add_argument("--width", type=int, default=1280, help="pixels (default: 1280)")
    parser.add_argument("--scheme", choices=["light", "dark"], default="light")
    args = parser.parse_args()
    args.into.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        for names in (PAIR, SERVED):
            runs = [str(RUNS / f"{name}.memtrace") for name in names]
            with serving("memtrace", "view", *runs) as (_, url, _):
                for name, (own, address, height) in PICTURES.items():
                    if own is names:
                        page = browser.new_page(
                            viewport={"width": args.width, "height": height},
                            color_scheme=args.scheme,
                        )
                        page.set_default_timeout(120_000)
                        take(page, f"{url}/{address}", args.into / f"{name}.png")
                        page.close()
        browser.close()


if __name__ == "__main__":
    main()
