"""Displays of objects that are made for browsers."""

from __future__ import annotations

import json
import unittest
from importlib.util import find_spec

from .test_cells import CellTest

SVG = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="{}" height="20">'
    '<rect width="9" height="9"/></svg>'
)


class Displays(CellTest):
    def plain(self, code: str) -> str:
        value = self.run_ok(code).value
        assert value is not None
        self.assertNotIn("text/html", value)
        self.assertNotIn("text/latex", value)
        return value["text/plain"]

    def test_recordings_are_named_with_type_and_length(self) -> None:
        imports = "from IPython.display import *\n"
        sound = self.plain(imports + "Audio([0.0, 0.5, -0.5, 0.0] * 4000, rate=8000)")
        self.assertEqual(sound, "Audio: audio/wav, 2.0 s, 32044 bytes")
        box = (
            "b'\\0\\0\\0\\x10ftypisom\\0\\0\\0\\0' + "
            "b'\\0\\0\\0\\x24moov\\0\\0\\0\\x1cmvhd' + bytes(12)"
        )
        film = f"{box} + (1000).to_bytes(4, 'big') + (2500).to_bytes(4, 'big') + bytes(8)"
        self.assertEqual(
            self.plain(f"{imports}open('a.mp4', 'wb').write({film})\nVideo('a.mp4')"),
            "Video: a.mp4, video/mp4, 2.5 s, 60 bytes",
        )
        self.assertEqual(
            self.plain(imports + "Video(url='https://a.test/b.webm')"),
            "Video: https://a.test/b.webm, video/webm",
        )
        self.assertEqual(
            self.plain(imports + "Audio(b'ID3 not a sound')"),
            "Audio: audio/wav, 15 bytes",
            "what is known is said",
        )
        self.assertEqual(
            self.plain(imports + "IFrame('https://a.test', 9, 9)"), "IFrame: https://a.test"
        )

    def test_code_is_plain_text(self) -> None:
        shown = self.plain(
            "from IPython.display import Code\nCode('def f(): return 1', language='python')"
        )
        self.assertEqual(shown, "def f(): return 1")

    @unittest.skipUnless(find_spec("resvg_py"), "skipped: needs resvg-py")
    def test_a_drawing_comes_with_a_picture_of_at_most_the_usual_size(self) -> None:
        for width, drawn in (("30", 30), ("1568.4", 1568), ("8000px", 1568), ("100mm", 378)):
            (frame,) = self.run_ok(
                f"from IPython.display import SVG\nSVG('''{SVG.format(width)}''')"
            ).frames
            self.assertEqual([blob["mime"] for blob in frame.header["blobs"]], ["image/png"], width)
            self.assertEqual(int.from_bytes(frame.payload[16:20], "big"), drawn)

    def test_a_drawing_that_cannot_be_drawn_comes_as_it_is(self) -> None:
        wide = (
            "<pattern id='p' width='1e6' height='1e6' patternUnits='userSpaceOnUse'>"
            "<rect width='1e6' height='1e6'/></pattern>"
        )
        for inner, attributes in (
            ("", ""),
            ("", "width='1e9' height='1e9'"),
            ("", "width='1' height='90000000'"),
            ("<", "width='9' height='9'"),
            # These two end the process that renders them: by an allocation, and by its stack.
            (wide + "<rect width='9' height='9' fill='url(#p)'/>", "width='9' height='9'"),
            ("<g>" * 100_000 + "</g>" * 100_000, "width='9' height='9'"),
        ):
            drawing = f"<svg xmlns='http://www.w3.org/2000/svg' {attributes}>{inner}</svg>"
            result = self.run_ok(f"class Odd:\n  def _repr_svg_(self): return {drawing!r}\nOdd()")
            (frame,) = result.frames
            self.assertEqual(frame.header["blobs"], [], drawing[:100])
            self.assertEqual(frame.header["data"]["image/svg+xml"], drawing)
            self.assertEqual(result.text, "")


@unittest.skipUnless(find_spec("plotly"), "skipped: needs plotly")
class Plotly(CellTest):
    def shown(self, code: str, is_large: bool = False) -> str:
        result = self.run_ok(code)
        texts = [frame.header["data"] for frame in result.frames]
        kinds = ["text/plain"] if is_large else ["text/plain", "application/vnd.plotly.v1+json"]
        self.assertEqual([list(data) for data in texts], [kinds], "no page")
        if not is_large:
            self.assertIn("data", json.loads(texts[0]["application/vnd.plotly.v1+json"]))
        self.assertEqual(result.text, "")
        return texts[0]["text/plain"]

    def test_a_figure_is_summed_up_as_value_and_when_it_is_shown(self) -> None:
        self.run_ok(
            "import plotly.graph_objects as go\n"
            "fig = go.Figure([go.Bar(name='north', x=['a', 'b', 'c'], y=[1, 2.5, None]), "
            "go.Scatter(y=[4], mode='lines')])\n"
            "fig.update_layout(title='<b>Sales</b>', xaxis_title='month')\n"
            "fig.update_yaxes(type='log', range=[0, 3], title_text='€')\n"
            "fig.add_annotation(text='peak', x=1, y=2);"
        )
        expected = (
            "Plotly figure: Sales\n"
            '  bar "north": 3 points; x: a, b, c; y: 1 to 2.5\n'
            "  scatter (lines): 1 point; y: 4\n"
            '  x axis: "month"\n'
            '  y axis: "€", log, range 10^0 to 10^3\n'
            "  annotations: peak\n"
            "No picture: "
        )
        for code in (
            "fig",
            "fig.show()",
            "fig.show(renderer='notebook')",
            "import plotly.io\nplotly.io.show(fig.to_dict())",
        ):
            self.assertTrue(self.shown(code).startswith(expected), self.shown(code))

    def test_the_renderer_that_code_chooses_needs_no_browser_either(self) -> None:
        code = (
            "import plotly.io as pio, plotly.graph_objects as go\n"
            "{}go.Figure(go.Pie(labels=['a'], values=[2])).show()"
        )
        for name in ("iframe", "browser", "colab", "png"):
            shown = self.shown(code.format(f"pio.renderers.default = {name!r}\n"))
            self.assertIn("pie: 1 point; labels: a; values: 2", shown)

    def test_large_and_odd_figures_have_short_summaries(self) -> None:
        self.run_ok("import plotly.graph_objects as go")
        many = self.shown(
            "go.Figure([go.Scatter(y=list(range(1000)), name='t' * 500) for _ in range(50)])"
        )
        self.assertLess(len(many), 6000)
        self.assertIn("… and 30 more traces", many)
        self.assertIn("without data", self.shown("go.Figure()"))
        texts = self.shown("go.Figure(go.Bar(x=[f'c{i}' for i in range(9)], y=[1]*9))")
        self.assertIn("x: c0, c1, c2, c3, c4, … (9 different)", texts)
        self.assertIn(
            "2×3 values; z: 0 to 5", self.shown("go.Figure(go.Heatmap(z=[[0, 1, 2], [3, 4, 5]]))")
        )
        dates = self.shown(
            "import datetime\ngo.Figure(go.Scatter(x=[datetime.date(2024, 1, 2), "
            "datetime.date(2025, 3, 4)], y=[1, 2]))"
        )
        self.assertIn("x: 2024-01-02 to 2025-03-04", dates)

    @unittest.skipUnless(find_spec("pandas"), "skipped: needs pandas")
    def test_arrays_are_read_whole(self) -> None:
        code = (
            "import numpy, pandas, plotly.express as px\n"
            "frame = pandas.DataFrame({'t': pandas.date_range('2024-01-01', periods=200_000, "
            "freq='min'), 'v': numpy.arange(200_000.0)})\n"
            "frame.loc[5, 'v'] = float('nan')\npx.line(frame, x='t', y='v')"
        )
        self.assertIn(
            "200000 points; x: 2024-01-01 to 2024-05-18T21:19:00; y: 0 to 199999",
            self.shown(code, is_large=True),
        )


@unittest.skipUnless(
    find_spec("matplotlib") and find_spec("notojp_matplotlib"),
    "skipped: needs matplotlib and a font",
)
class Glyphs(CellTest):
    def test_plots_have_glyphs_for_chinese_japanese_korean_and_emoji_in_every_style(self) -> None:
        for style in ("", "plt.rcParams['font.family'] = 'serif'\n", "plt.style.use('ggplot')\n"):
            result = self.run_ok(
                f"import matplotlib.pyplot as plt\n{style}plt.title('汉字 データ 한국어 🚀📈');"
            )
            self.assertEqual(result.text, "", "no warning of a missing glyph")
            self.assertEqual(
                [blob["mime"] for blob in result.frames[0].header["blobs"]], ["image/png"]
            )
        control = self.run_ok("import matplotlib.pyplot as plt\nplt.title('\\U00012000');").text
        self.assertIn("missing from font", control)

    def test_the_fonts_are_written_into_files_too(self) -> None:
        for kind in ("pdf", "svg", "ps"):
            code = (
                "import matplotlib.pyplot as plt\nplt.figure()\nplt.title('汉字')\n"
                f"plt.savefig('a.{kind}')\nplt.close()"
            )
            self.assertEqual(self.run_ok(code).text, "", kind)
