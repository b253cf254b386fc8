//! What a cell shows: text in true order, values, rich output, pictures, and how long output is
//! cut.

use serde_json::{Value, json};

use crate::support::server::{Server, Session, ToolResult};

fn session() -> Session<'static> {
    Server::shared().session()
}

/// Runs code in a new session and compares its whole text.
#[track_caller]
fn check(code: &str, expected: &str) {
    assert_eq!(session().text(code), expected, "{code}");
}

#[test]
fn printed_text_values_and_silence_read_as_a_person_expects() {
    check("print('a'); print('b')", "a\nb");
    check("1 + 1", "2");
    check("print('a')\n'b'", "a\n'b'");
    check("x = 1", "(no output)");
    check("", "(no output)");
    check("# only a comment", "(no output)");
    check("1 + 1;", "(no output)");
    check("def f(n):\n    return n * 2\nf(21)", "42");
    check("print('ä😀')", "ä😀");
}

#[test]
fn functions_imports_and_variables_live_from_call_to_call() {
    let session = session();
    session.text("import math\ndef area(r):\n    return math.pi * r ** 2\nr = 2");
    assert_eq!(session.text("round(area(r), 2)"), "12.57");
    let result = session.run("r = 3; del area; new = [1, 2]");
    let variables = &result.structured()["variables"];
    assert_eq!(variables["created"][0]["name"], "new");
    assert_eq!(variables["changed"][0]["name"], "r");
    assert_eq!(variables["deleted"], json!(["area"]));
    let result = session.run("open('made.txt', 'w').write('12345')");
    assert_eq!(
        result.structured()["files"]["created"],
        json!([{"path": "made.txt", "bytes": 5}])
    );
}

#[test]
fn both_streams_displays_and_the_value_keep_their_true_order() {
    let code = "
import sys, os
from IPython.display import display
print('1 out')
print('2 err', file=sys.stderr)
display('3 display')
os.write(1, b'4 descriptor\\n')
os.system('echo 5 shell; echo 6 shell err >&2')
print('7 out')
'8 value'
";
    let expected =
        "1 out\n2 err\n'3 display'\n4 descriptor\n5 shell\n6 shell err\n7 out\n'8 value'";
    check(code, expected);
}

#[test]
fn a_thousand_short_cells_each_get_exactly_their_own_output() {
    let session = session();
    for number in 0..1000 {
        let code = match number % 4 {
            0 => format!("print('cell {number}')"),
            1 => format!("import sys; print('cell {number}', file=sys.stderr)"),
            2 => format!("import os; n = os.write(1, b'cell {number}')"),
            _ => format!("from IPython.display import Markdown; Markdown('cell {number}')"),
        };
        assert_eq!(session.text(&code), format!("cell {number}"));
    }
}

#[test]
fn python_errors_keep_what_was_printed_and_show_the_failing_line() {
    let result = session().run("print('before')\nx = 1\ny = x / 0\nprint('after')");
    result.assert_refused(&[
        "before",
        "ZeroDivisionError",
        "division by zero",
        "y = x / 0",
    ]);
    assert!(
        !result.text().contains("after\n") && !result.text().contains('\u{1b}'),
        "{}",
        result.text()
    );
    let error = &result.structured()["error"];
    assert_eq!(
        (&error["name"], &error["line"]),
        (&json!("ZeroDivisionError"), &json!(3))
    );
    assert!(error["traceback"].as_str().unwrap().contains("y = x / 0"));
    assert_eq!(result.status(), "error");

    let result = session().run("print('never')\nif True print(1)");
    result.assert_refused(&["SyntaxError", "if True print(1)"]);
    assert!(!result.text().contains("never\n"), "{}", result.text());
    session()
        .run("raise SystemExit(3)")
        .assert_refused(&["SystemExit"]);
    session()
        .run("raise KeyboardInterrupt")
        .assert_refused(&["KeyboardInterrupt"]);
}

#[test]
fn input_fails_at_once_instead_of_waiting() {
    session()
        .run_with("name = input('who? ')", json!({"timeout": 30}))
        .assert_refused(&["Error", "input"]);
    session().run_with("import sys; repr(sys.stdin.read())", json!({"timeout": 30}));
}

#[test]
fn await_magics_and_shell_commands_work_as_in_a_notebook() {
    check(
        "import asyncio\nawait asyncio.sleep(0, 'awaited')",
        "'awaited'",
    );
    check("!echo from the shell", "from the shell");
    check("lines = !echo one; echo two\nlist(lines)", "['one', 'two']");
    check("%%bash\necho one\necho two >&2", "one\ntwo");
    check(
        "%pwd",
        "'/work'"
            .replace("/work", &session().text("import os; print(os.getcwd())"))
            .as_str(),
    );
    let timed = session().text("%timeit -n 1 -r 1 pass");
    assert!(timed.contains("per loop"), "{timed}");
    session()
        .run("%no_such_magic")
        .assert_refused(&["no_such_magic"]);
}

#[test]
fn colours_are_removed_and_redrawn_lines_are_folded() {
    check(
        "print('\\x1b[31mred\\x1b[0m \\x1b]0;title\\x07plain')",
        "red plain",
    );
    check(
        "for n in range(101): print(f'\\r{n}%', end='')\nprint()",
        "100%",
    );
    check(
        "from IPython.display import clear_output\nprint('gone')\nclear_output()\nprint('stays')",
        "stays",
    );
    check(
        "from IPython.display import display\nh = display('first', \
         display_id=True)\nprint('middle')\nh.update('second')",
        "'second'\nmiddle",
    );
}

#[test]
fn late_text_of_a_thread_or_process_is_told_apart_from_the_cells_own() {
    let session = session();
    let mark = "[Late output, printed by code of earlier cells:]";
    session.text(
        "import threading\ngo = threading.Event()\ndef late():\n    go.wait()\n    \
                  print('late thread')\nt = threading.Thread(target=late); t.start()",
    );
    assert_eq!(
        session.text("go.set(); t.join(); print('mine')"),
        format!("mine\n{mark}\nlate thread")
    );
    session.text(
        "import os\nos.mkfifo('go')\nimport subprocess\np = subprocess.Popen('read line < go; echo \
         late process', shell=True)",
    );
    let told = session.text("n = open('go', 'w').write('x\\n'); p.wait(); print('mine too')");
    assert_eq!(told, format!("mine too\n{mark}\nlate process"));
    assert_eq!(session.text("print('next')"), "next");
}

#[test]
fn tasks_go_on_between_cells_and_what_they_print_is_told_by_the_next() {
    let session = session();
    session.text(
        "import asyncio\nasync def speak(): print('task')\ntask = asyncio.create_task(speak())",
    );
    let told = session.text("task.done()");
    assert_eq!(
        told,
        "True\n[Late output, printed by code of earlier cells:]\ntask"
    );
}

#[test]
fn half_a_million_lines_keep_head_and_tail_and_all_of_them_can_be_read() {
    // A server of its own: what others make a shared one hold would count here.
    let server = Server::start(&[]);
    let session = server.session();
    session.text("print('warm')");
    let before = server.resident_bytes();
    let result = session.run("for n in range(500_000): print('line', n)");
    assert!(!result.is_error());
    let text = result.text();
    assert!(
        text.starts_with("line 0\nline 1\n") && text.ends_with("line 499999"),
        "{text}"
    );
    assert!(
        text.chars().count() < 6000,
        "{} characters",
        text.chars().count()
    );
    let output = &result.structured()["output"];
    assert_eq!(output["lines"], 500_000);
    let whole = (0..500_000)
        .map(|number| format!("line {number}\n"))
        .collect::<String>();
    assert_eq!(output["chars"], whole.len());
    assert_eq!(read_pages(&result, &session), whole);
    let grown = server.resident_bytes().saturating_sub(before);
    assert!(grown < 128 << 20, "the server grew by {grown} bytes");
}

#[test]
fn a_hundred_megabytes_leave_the_servers_memory_bounded() {
    let server = Server::start(&[]);
    let session = server.session();
    session.text("print('warm')");
    let before = server.resident_bytes();
    let result = session.run(
        "import sys\nfor n in range(100): sys.stdout.write(chr(97 + n % 26) * 1_000_000 + '\\n')",
    );
    let text = result.text();
    assert!(text.starts_with("aaaa") && text.ends_with("vvvv"), "{text}");
    assert_eq!(result.structured()["output"]["chars"], 100 * 1_000_001);
    let grown = server.resident_bytes().saturating_sub(before);
    assert!(grown < 64 << 20, "the server grew by {grown} bytes");
}

#[test]
fn output_is_cut_exactly_beyond_the_limit_and_never_below() {
    let session = session();
    let fits = session.run_with("print('x' * 100, end='')", json!({"max_output_chars": 100}));
    assert_eq!(fits.text(), "x".repeat(100));
    assert_eq!(fits.structured()["output"]["resource"], json!(null));
    let cut = session.run_with("print('x' * 101, end='')", json!({"max_output_chars": 100}));
    assert!(
        cut.text().contains("cut here") && cut.text().contains("cellblock://sessions/"),
        "{}",
        cut.text()
    );
    assert_eq!(read_pages(&cut, &session), "x".repeat(101));
    let listed = session.server.request("resources/list", json!({}));
    assert!(
        listed
            .to_string()
            .contains(cut.structured()["output"]["resource"].as_str().unwrap())
    );
    let failed = session.run_with(
        "raise ValueError('x' * 10_000)",
        json!({"max_output_chars": 200}),
    );
    assert!(
        failed.text().chars().count() < 1000 && failed.text().contains("ValueError"),
        "{}",
        failed.text()
    );
}

#[test]
fn resources_that_do_not_exist_are_invalid_parameters() {
    for uri in [
        "cellblock://sessions/none/executions/1/output",
        "file:///etc/passwd",
        "cellblock://sessions/../x",
    ] {
        let answer = Server::shared().request("resources/read", json!({"uri": uri}));
        assert_eq!(answer["error"]["code"], -32602, "{uri}: {answer}");
    }
}

#[test]
fn a_cell_of_ten_thousand_lines_and_a_hundred_slow_pieces_work() {
    let code = (0..10_000)
        .map(|number| format!("x{number} = {number}\n"))
        .collect::<String>()
        + "print(x9999)";
    check(&code, "9999");
    let code = "import time\nfor n in range(100):\n    print(n, end=' ', flush=True)\n    \
                time.sleep(0.001)";
    let expected = (0..100)
        .map(|number| number.to_string())
        .collect::<Vec<_>>()
        .join(" ");
    assert_eq!(session().text(code).trim_end(), expected);
}

#[test]
fn invalid_utf8_and_binary_rubbish_do_no_harm() {
    let session = session();
    let result = session.run("import os\nn = os.write(1, bytes(range(256)) * 100)\nprint('after')");
    assert!(
        !result.is_error() && result.text().ends_with("after"),
        "{}",
        result.text()
    );
    assert_eq!(session.text("1"), "1");
}

#[test]
fn a_plot_is_an_image_block_of_the_right_size() {
    let session = session();
    let result = session.run(
        "import matplotlib.pyplot as plt\nplt.figure(figsize=(4, 3), \
                              dpi=100)\nplt.plot([1, 2, 3])\nplt.show()\nprint('done')",
    );
    let images = result.images();
    assert_eq!(images.len(), 1);
    assert_eq!(images[0].0, "image/png");
    let (width, height) = (images[0].1.width(), images[0].1.height());
    // Inline plots are trimmed to what is drawn, so the size is near to what was asked for.
    assert!(
        (300..=450).contains(&width) && (220..=350).contains(&height),
        "{width}×{height}"
    );
    assert_eq!(result.structured()["images"][0]["width"], width);
    assert!(
        result.text().contains("[image 1: ") && result.text().ends_with("done"),
        "{}",
        result.text()
    );
}

#[test]
fn several_images_come_in_their_order_and_a_huge_one_is_scaled_down() {
    let session = session();
    let code = "
from IPython.display import display
from PIL import Image
display(Image.new('RGB', (10, 20), 'red'))
print('between')
display(Image.new('RGB', (30, 40), 'blue'))
Image.new('RGB', (6000, 3000), 'green')
";
    let result = session.run(code);
    let images = result.images();
    let sizes: Vec<(u32, u32)> = images
        .iter()
        .map(|(_, image)| (image.width(), image.height()))
        .collect();
    assert_eq!(sizes[..2], [(10, 20), (30, 40)]);
    assert_eq!(images[0].1.to_rgb8().get_pixel(0, 0).0, [255, 0, 0]);
    assert_eq!(images[1].1.to_rgb8().get_pixel(0, 0).0, [0, 0, 255]);
    let (width, height) = sizes[2];
    assert!(width <= 2048 && width == height * 2, "{width}×{height}");
    let marks: Vec<usize> = [
        "[image 1: 10×20",
        "between",
        "[image 2: 30×40",
        "[image 3: ",
    ]
    .iter()
    .map(|mark| {
        result
            .text()
            .find(mark)
            .unwrap_or_else(|| panic!("{mark} is not in {}", result.text()))
    })
    .collect();
    assert!(marks.is_sorted(), "{}", result.text());
    assert!(
        result.text().contains("scaled down from 6000×3000"),
        "{}",
        result.text()
    );
}

#[test]
fn the_json_of_a_plotly_figure_is_a_resource_of_its_own() {
    let session = session();
    let result = session.run(
        "print('x' * 20_000)\nimport plotly.express as px\n\
         px.line(x=[1, 2], y=[3, 4], title='Sales').show()\npx.pie(values=[5])",
    );
    let uris = &result.structured()["output"]["figures"];
    assert_eq!(uris.as_array().map(Vec::len), Some(2), "{uris}");
    for (uri, title) in [(&uris[0], json!("Sales")), (&uris[1], Value::Null)] {
        let uri = uri.as_str().unwrap();
        assert!(result.text().contains(uri), "{}", result.text());
        let contents = session.server.read_resource(uri);
        assert_eq!(contents["mimeType"], "application/vnd.plotly.v1+json");
        let figure: Value = serde_json::from_str(contents["text"].as_str().unwrap()).unwrap();
        assert_eq!(figure["layout"]["title"]["text"], title);
    }
}

#[test]
fn other_rich_output_arrives_as_text_that_a_model_can_use() {
    let session = session();
    session.text("from IPython.display import *");
    for (code, words) in [
        ("Markdown('# Title')", vec!["# Title"]),
        ("Latex('$x^2$')", vec!["x^2"]),
        ("JSON({'key': [1, 2]})", vec!["key"]),
        (
            "import pandas as pd; pd.DataFrame({'column': [1, 2]})",
            vec!["column", "1", "2"],
        ),
        (
            "HTML('<table><tr><td>cell</td></tr></table>')",
            vec!["cell"],
        ),
        (
            "SVG('<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"5\" height=\"5\"></svg>')",
            vec!["[image 1: 5×5 png]"],
        ),
        (
            "SVG('<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"1\" height=\"5000\"></svg>')",
            vec!["[SVG drawing, 1 × 5000"],
        ),
        (
            "Audio([0.0] * 800, rate=400)",
            vec!["Audio: audio/wav, 2.0 s"],
        ),
        ("Code('x = 1', language='python')", vec!["x = 1"]),
        (
            "pd.DataFrame({'share': [0.5, 12]}).style.format('{:.1%}')",
            vec!["     share\n0    50.0%\n1  1200.0%"],
        ),
        (
            "import plotly.express as px; px.line(x=[1, 2], y=[3, 4], title='Sales')",
            vec!["Plotly figure: Sales\n", "y: 3 to 4"],
        ),
        (
            "px.line(x=[1, 2], y=[3, 4], title='Sales').show()",
            vec!["Plotly figure: Sales\n", "y: 3 to 4"],
        ),
        (
            "import io, PIL.Image as pil\nfile = io.BytesIO()\n\
             pil.new('RGB', (6, 4)).save(file, 'GIF', save_all=True, append_images=[pil.new('RGB', \
             (6, 4), 'red')])\n\
             Image(data=file.getvalue(), format='gif')",
            vec!["[image 1: 6×4 png, the first of 2 frames of an animation]"],
        ),
        (
            "display({'application/vnd.plotly.v1+json': {'data': [{'type': 'bar', 'y': [1]}], \
             'layout': {'title': 'Sales'}}, 'text/plain': 'Figure()'}, raw=True)",
            vec!["plotly"],
        ),
    ] {
        let text = session.text(code);
        for word in words {
            assert!(
                text.to_lowercase().contains(&word.to_lowercase()),
                "{code} gave {text:?}"
            );
        }
        assert!(text.len() < 2000, "{code} gave {} bytes", text.len());
    }
}

#[test]
fn a_broken_image_does_not_lose_the_text() {
    let session = session();
    let text = session.text(
        "from IPython.display import Image, display\nprint('before')\n\
         display(Image(data=b'\\x89PNG\\r\\n\\x1a\\nbroken', format='png'))\nprint('after')",
    );
    assert!(text.contains("before") && text.contains("after"), "{text}");
}

#[test]
fn a_result_tells_duration_memory_and_isolation() {
    let result = session().run("import time; data = bytearray(50_000_000)");
    let structured = result.structured();
    assert!(structured["duration_ms"].as_f64().unwrap() > 0.0);
    assert!(
        structured["memory_bytes"].as_u64().unwrap() > 50_000_000,
        "{structured}"
    );
    let layers = structured["isolation"].as_object().unwrap();
    assert!(layers.len() >= 5, "{structured}");
    assert!(
        !layers.values().any(|state| state == "missing"),
        "{structured}"
    );
}

/// Reads the whole output of an execution, page by page.
#[track_caller]
fn read_pages(result: &ToolResult, session: &Session<'_>) -> String {
    let resource = result.structured()["output"]["resource"]
        .as_str()
        .expect("the output was cut");
    let mut whole = String::new();
    let mut offset = 0;
    loop {
        let page = session
            .server
            .read_resource(&format!("{resource}?offset={offset}&limit=1000003"));
        let next = &page["_meta"]["cellblock/nextOffset"];
        let text = page["text"]
            .as_str()
            .unwrap_or_else(|| panic!("no page at {offset}: {page}"));
        match next.as_u64() {
            Some(next) => {
                // The last line of a page that has a successor is ours.
                whole.push_str(&text[..text.rfind("\n[… ").expect("the page says how to go on")]);
                offset = next;
            }
            None => {
                whole.push_str(text);
                return whole;
            }
        }
    }
}
