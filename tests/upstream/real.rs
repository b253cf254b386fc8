//! Servers that many people use, as they are installed from package registries: every module that
//! is made of their tools can be imported and knows its schema, and calls come back with what these
//! servers do.
//!
//! Nothing here leaves the machine: servers that speak to a service are given one on the loopback
//! interface, and browsers are not started.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::sync_channel;

use serde_json::{Value, json};
use tempfile::TempDir;

use super::elsewhere::{Elsewhere, answer};
use super::register;
use crate::clients::installed;
use crate::support::server::{Era, MINIMAL, Server, Session, TEST_TIMEOUT, finished, program};
use crate::support::{listening_ports, npm, skipped};

/// What the servers from the Python index are. The second needs an older generation of the library.
const PYTHON_SERVERS: [&str; 4] = [
    "mcp-server-time==2026.10.19",
    "mcp-server-git==2026.10.19",
    "mcp-server-fetch==2026.10.24",
    "mcp==2.3.0",
];
const OLDER_PYTHON_SERVERS: [&str; 2] = ["mcp-server-sqlite==2025.4.25", "mcp==1.30.0"];

/// Servers have twice the time that they usually have: Node and Python take long to start on a busy
/// machine.
fn node_server(folder: &Path, name: &str, args: &[&str], env: Value) -> Value {
    let script = folder.join("node_modules/.bin").join(name);
    let mut all = vec![script.to_str().unwrap()];
    all.extend(args);
    json!({
        "command": npm::node_program(folder),
        "args": all,
        "env": env,
        "connect_timeout": TEST_TIMEOUT.as_secs(),
    })
}

fn python_server(python: &Path, name: &str, args: &[&str]) -> Value {
    json!({
        "command": python.with_file_name(name),
        "args": args,
        "connect_timeout": TEST_TIMEOUT.as_secs(),
    })
}

/// Registers a server, imports all of its modules in a session, and compares what they take with
/// what is kept of the server's list.
fn register_and_import(session: &Session<'_>, name: &str, params: Value) {
    let request = json!({"server_name": name, "server_params": params});
    let registered = session.server.call("register_mcp_server", request);
    assert!(!registered.is_error(), "{name}: {}", registered.text());
    let tools = registered.structured()["tools"].as_array().unwrap().clone();
    let code = format!(
        "import importlib, json, pydantic\n\
         def look(name):\n    \
             module = importlib.import_module('mcptools.{name}.' + name)\n    \
             assert callable(module.run) and callable(module.run_async) and module.run.__doc__, \
             name\n    \
             result = getattr(module, 'Result', None)\n    \
             assert result is None or pydantic.TypeAdapter(result).json_schema(), name\n    \
             return sorted(module.Params.model_json_schema().get('properties', {{}}))\n\
         print(json.dumps({{name: look(name) for name in json.loads('''{}''')}}))",
        json!(tools.iter().map(|tool| &tool["module"]).collect::<Vec<_>>())
    );
    let text = session.text(&code);
    let found: BTreeMap<String, Vec<String>> =
        serde_json::from_str(&text).unwrap_or_else(|_| panic!("{name} has no list: {text}"));
    let found: BTreeMap<&str, &Vec<String>> = tools
        .iter()
        .map(|tool| {
            (
                tool["name"].as_str().unwrap(),
                &found[tool["module"].as_str().unwrap()],
            )
        })
        .collect();
    let kept = kept_list(name);
    let expected: BTreeMap<&str, &Vec<String>> = kept
        .iter()
        .map(|(tool, takes)| (tool.as_str(), takes))
        .collect();
    assert_eq!(found, expected, "{name}");
}

/// The tools of a server as `typed/` keeps them: their names, and what each takes.
fn kept_list(name: &str) -> BTreeMap<String, Vec<String>> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("typed/tests/real/{name}.json"));
    let tools: Vec<Value> = serde_json::from_str(&fs::read_to_string(file).unwrap()).unwrap();
    let takes = |tool: &Value| {
        let mut names: Vec<String> = tool["inputSchema"]["properties"]
            .as_object()
            .into_iter()
            .flat_map(|all| all.keys().cloned())
            .collect();
        names.sort();
        names
    };
    tools
        .iter()
        .map(|tool| (tool["name"].as_str().unwrap().to_owned(), takes(tool)))
        .collect()
}

#[test]
fn servers_from_npm_are_imported_whole_and_called() {
    let Some(folder) = npm::servers() else {
        return skipped("npm");
    };
    let place = tempfile::tempdir().unwrap();
    let path = |name: &str| place.path().join(name).to_str().unwrap().to_owned();
    fs::create_dir(path("files")).unwrap();
    let server = Server::start(MINIMAL);
    let session = server.session();
    let node = |name: &str, args: &[&str], env: Value| node_server(folder, name, args, env);
    register_and_import(
        &session,
        "everything",
        node("mcp-server-everything", &[], json!({})),
    );
    register_and_import(
        &session,
        "filesystem",
        node("mcp-server-filesystem", &[&path("files")], json!({})),
    );
    let memory = json!({"MEMORY_FILE_PATH": path("memory.jsonl")});
    register_and_import(&session, "memory", node("mcp-server-memory", &[], memory));
    register_and_import(
        &session,
        "sequential_thinking",
        node("mcp-server-sequential-thinking", &[], json!({})),
    );

    let everything = "from mcptools.everything import get_sum, get_structured_content, \
                      get_tiny_image, get_resource_links, get_annotated_message\n\
                      print(get_sum.run(get_sum.Params(a=2, b=3)))\n\
                      weather = get_structured_content.run(\
                      get_structured_content.Params(location='Chicago'))\n\
                      print(type(weather) is get_structured_content.Result, \
                      type(weather.temperature).__name__, type(weather.conditions).__name__)\n\
                      links = get_resource_links.run(get_resource_links.Params(count=2)).content\n\
                      print([type(each).__name__ for each in links])\n\
                      [type(each).__name__ for each in get_tiny_image.run().content]";
    let said = "The sum of 2 and 3 is 5.\nTrue float str\n['Text', 'Link', 'Link']\n['Text', \
                'Image', 'Text']";
    assert_eq!(session.text(everything), said);
    super::raised(
        &session,
        "get_structured_content.Params(location='Paris')",
        "ValidationError",
    );
    let slow = "from mcptools.everything import trigger_long_running_operation as \
                slow\nprint(slow.run(slow.Params(duration=1, steps=2)))";
    let pending = session.begin(slow, json!({}));
    server.notification(|message| {
        let told = message["params"]["message"].as_str().unwrap_or_default();
        message["params"]["progressToken"] == pending.id()
            && told.contains("everything.trigger-long-running-operation")
    });
    assert!(
        pending
            .result()
            .text()
            .contains("Long running operation completed")
    );

    let filesystem = format!(
        "import mcptools\nfrom mcptools.filesystem import write_file, read_text_file, edit_file, \
         list_directory, get_file_info\n\
         path = {:?}\n\
         write_file.run(write_file.Params(path=path, content='zażółć\\ngęślą'))\n\
         edit_file.run(edit_file.Params(path=path, edits=[{{'oldText': 'gęślą', 'newText': \
         'jaźń'}}]))\n\
         print(repr(read_text_file.run(read_text_file.Params(path=path)).content))\n\
         print(list_directory.run(list_directory.Params(path={:?})).content)\n\
         try: read_text_file.run(read_text_file.Params(path='/etc/passwd'))\n\
         except mcptools.ToolError as error: print(str(error)[:13])",
        path("files/note.txt"),
        path("files"),
    );
    let said = session.text(&filesystem);
    assert!(
        said.starts_with("'zażółć\\njaźń'\n[FILE] note.txt\nAccess denied"),
        "{said}"
    );
    assert_eq!(
        fs::read_to_string(path("files/note.txt")).unwrap(),
        "zażółć\njaźń"
    );

    let memory = "from mcptools.memory import create_entities, create_relations, read_graph\n\
                  create_entities.run(create_entities.Params(entities=[{'name': n, 'entityType': \
                  'animal', 'observations': ['small']} for n in ('cat', 'mouse')]))\n\
                  create_relations.run(create_relations.Params(relations=[{'from': 'cat', 'to': \
                  'mouse', 'relationType': 'chases'}]))\n\
                  graph = read_graph.run()\n\
                  [entity.name for entity in graph.entities], \
                  graph.relations[0].model_dump(by_alias=True)";
    let said = "(['cat', 'mouse'], {'from': 'cat', 'to': 'mouse', 'relationType': 'chases'})";
    assert_eq!(session.text(memory), said);

    let thinking = "from mcptools.sequential_thinking import sequentialthinking as thinking\n\
                    done = thinking.run(thinking.Params(thought='first', nextThoughtNeeded=False, \
                    thoughtNumber=1, totalThoughts=1))\n\
                    (done.thoughtHistoryLength, done.nextThoughtNeeded)";
    assert_eq!(session.text(thinking), "(1.0, False)");
}

#[test]
fn servers_of_services_and_browsers_from_npm_are_imported_whole() {
    let Some(folder) = npm::servers() else {
        return skipped("npm");
    };
    // The service says back what it was sent, as careless ones do.
    let service = Elsewhere::serve(None, |request| {
        let sent = request.header("authorization").unwrap_or_default();
        let error = json!({
            "object": "error", "status": 401, "code": "unauthorized",
            "message": format!("{sent} is not valid"),
        });
        answer("401 Unauthorized", &error.to_string())
    });
    let mut command = program();
    command
        .arg("mcp")
        .args(MINIMAL)
        .env("NOTION_TOKEN", "ntn_canary4711");
    let server = Server::spawn(&mut command, Era::Initialize);
    server.greet();
    let session = server.session();
    let node = |name: &str, args: &[&str], env: Value| node_server(folder, name, args, env);
    let notion = json!({
        "NOTION_TOKEN": "${NOTION_TOKEN}",
        "BASE_URL": format!("http://127.0.0.1:{}", service.address.port()),
    });
    register_and_import(&session, "notion", node("notion-mcp-server", &[], notion));
    register_and_import(&session, "context7", node("context7-mcp", &[], json!({})));
    register_and_import(
        &session,
        "playwright",
        node("playwright-mcp", &["--headless", "--isolated"], json!({})),
    );
    let quiet = json!({"CHROME_DEVTOOLS_MCP_NO_UPDATE_CHECKS": "1"});
    let chrome = node(
        "chrome-devtools-mcp",
        &["--headless", "--no-usage-statistics"],
        quiet,
    );
    register_and_import(&session, "chrome_devtools", chrome);

    let code = "import mcptools\n\
                try: said = str(mcptools.call('notion', 'API-get-self', {}))\n\
                except mcptools.ToolError as error: said = str(error)\n\
                print(said)";
    let said = session.text(code);
    assert!(
        said.contains("unauthorized") && said.contains("Bearer [hidden] is not valid"),
        "{said}"
    );
    let heard = service.heard();
    assert_eq!(
        heard[0].header("authorization"),
        Some("Bearer ntn_canary4711"),
        "what was filled in was used"
    );
    assert!(!said.contains("canary"), "{said}");
}

#[test]
fn servers_from_the_python_index_are_imported_whole_and_called() {
    let newer = installed("servers-2026.10.24", &PYTHON_SERVERS);
    let older = installed("servers-2025.4.25", &OLDER_PYTHON_SERVERS);
    let (Some(newer), Some(older)) = (newer, older) else {
        return skipped("a package index");
    };
    let place = tempfile::tempdir().unwrap();
    let path = |name: &str| place.path().join(name).to_str().unwrap().to_owned();
    let repository = repository(&place);
    let page = Elsewhere::serve(None, |_| {
        let text = "<html><body><article><h1>A heading</h1><p>A paragraph of some length, about \
                    nothing at all.</p></article></body></html>";
        answer("200 OK", text).replace("application/json", "text/html")
    });
    let server = Server::start(MINIMAL);
    let session = server.session();
    register_and_import(
        &session,
        "time",
        python_server(&newer, "mcp-server-time", &["--local-timezone", "UTC"]),
    );
    let git = python_server(&newer, "mcp-server-git", &["--repository", &repository]);
    register_and_import(&session, "git", git);
    let fetch = python_server(
        &newer,
        "mcp-server-fetch",
        &["--ignore-robots-txt", "--allow-private-ips"],
    );
    register_and_import(&session, "fetch", fetch);
    let sqlite = python_server(
        &older,
        "mcp-server-sqlite",
        &["--db-path", &path("data.sqlite")],
    );
    register_and_import(&session, "sqlite", sqlite);

    let time = "from mcptools.time import convert_time, get_current_time\n\
                now = get_current_time.run(get_current_time.Params(timezone='Europe/Warsaw'))\n\
                there = convert_time.run(convert_time.Params(source_timezone='UTC', time='12:00', \
                target_timezone='Asia/Tokyo'))\n\
                (now.timezone, there.target.datetime[11:16], there.time_difference)";
    assert_eq!(session.text(time), "('Europe/Warsaw', '21:00', '+9.0h')");

    let git = format!(
        "from mcptools.git import git_log, git_status\n\
         print('first words' in str(git_log.run(git_log.Params(repo_path={repository:?}))), \
         'new.txt' in str(git_status.run(git_status.Params(repo_path={repository:?}))))"
    );
    assert_eq!(session.text(&git), "True True");

    let fetch = format!(
        "from mcptools.fetch import \
         fetch\nprint(fetch.run(fetch.Params(url='http://127.0.0.1:{}/page')))",
        page.address.port()
    );
    assert!(session.text(&fetch).contains("A paragraph of some length"));

    let sqlite = "from mcptools.sqlite import create_table, write_query, read_query\n\
                  create_table.run(create_table.Params(query='CREATE TABLE notes (text TEXT)'))\n\
                  write_query.run(write_query.Params(query=\"INSERT INTO notes VALUES ('one'), \
                  ('two')\"))\n\
                  print(read_query.run(read_query.Params(query='SELECT count(*) AS n FROM \
                  notes')))";
    assert_eq!(session.text(sqlite), "[{'n': 2}]");
}

/// Makes a repository with one commit and a file that is not in it.
fn repository(place: &TempDir) -> String {
    let folder = place.path().join("repository");
    fs::create_dir(&folder).unwrap();
    for arguments in [
        &["init", "--quiet"][..],
        &[
            "-c",
            "user.name=a",
            "-c",
            "user.email=a@b.c",
            "commit",
            "--quiet",
            "--allow-empty",
            "-m",
            "first words",
        ],
    ] {
        let (status, _, errors) =
            finished(Command::new("git").args(arguments).current_dir(&folder));
        assert_eq!(status, Some(0), "{errors}");
    }
    fs::write(folder.join("new.txt"), "").unwrap();
    folder.to_str().unwrap().to_owned()
}

#[test]
fn one_server_is_the_same_over_every_transport() {
    let Some(folder) = npm::servers() else {
        return skipped("npm");
    };
    let (streamable, sse) = (
        Listening::start(folder, "streamableHttp"),
        Listening::start(folder, "sse"),
    );
    let server = Server::start(MINIMAL);
    let session = server.session();
    let pipes = node_server(folder, "mcp-server-everything", &["stdio"], json!({}));
    let at = |port: u16, path: &str| json!({"url": format!("http://127.0.0.1:{port}/{path}")});
    for (name, params) in [
        ("pipes", pipes),
        ("web", at(streamable.port, "mcp")),
        ("events", at(sse.port, "sse")),
    ] {
        register(&server, name, params);
        let code = format!(
            "from mcptools.{name} import echo, get_sum, get_tiny_image\nimport asyncio\n\
             sums = await asyncio.gather(*(get_sum.run_async(get_sum.Params(a=n, b=1)) for n in \
             range(20)))\n\
             print(echo.run(echo.Params(message='żółw')), [str(each).split()[-1] for each in sums] \
             == [f'{{n + 1}}.' for n in range(20)])\n\
             len(get_tiny_image.run().content[1].data) > 1000"
        );
        assert_eq!(session.text(&code), "Echo: żółw True\nTrue", "{name}");
    }
    assert!(
        server
            .call("list_mcp_servers", json!({}))
            .text()
            .contains("web (http), connected")
    );
    // A server that is started anew has forgotten its sessions, and listens elsewhere.
    drop(streamable);
    let lost = "from mcptools.web import echo\necho.run(echo.Params(message='x'))";
    super::raised(&session, lost, "ToolCallError");
    let again = Listening::start(folder, "streamableHttp");
    register(&server, "web", at(again.port, "mcp"));
    assert_eq!(
        session.text("from mcptools.web import echo\nprint(echo.run(echo.Params(message='x')))"),
        "Echo: x"
    );
}

/// A server of npm that listens at a port of its own choice.
struct Listening {
    child: Child,
    port: u16,
}

impl Listening {
    fn start(folder: &Path, transport: &str) -> Listening {
        let mut command = npm::node(folder);
        command
            .arg(folder.join("node_modules/.bin/mcp-server-everything"))
            .arg(transport)
            .env("PORT", "0");
        let mut child = command
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("Node can be run");
        let errors = BufReader::new(child.stderr.take().expect("it is a pipe"));
        let (sender, told) = sync_channel(1);
        std::thread::spawn(move || {
            // Reads on to the end, so that the server never waits for us.
            for line in errors
                .lines()
                .map_while(Result::ok)
                .filter(|line| line.contains(" on port "))
            {
                let _ = sender.try_send(line);
            }
        });
        told.recv_timeout(TEST_TIMEOUT)
            .expect("the server says that it listens");
        // It says the port that it was given, which is none.
        let port = listening_ports(child.id())[0];
        Listening { child, port }
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_person_decides_about_a_call_of_a_real_server() {
    let Some(folder) = npm::servers() else {
        return skipped("npm");
    };
    let place = tempfile::tempdir().unwrap();
    let mut command = program();
    command
        .arg("mcp")
        .args(MINIMAL)
        .args(["--approve-tools", "ask"]);
    let server = Server::spawn(&mut command, Era::Initialize);
    let client = json!({"name": "tests", "version": "1"});
    let capabilities = json!({"elicitation": {}});
    server.request(
        "initialize",
        json!({
            "protocolVersion": "2025-11-25", "capabilities": capabilities, "clientInfo": client,
        }),
    );
    server.notify("notifications/initialized", json!({}));
    let call = |tool: &str, arguments: Value| {
        server.begin_request("tools/call", json!({"name": tool, "arguments": arguments}))
    };
    let params = node_server(
        folder,
        "mcp-server-filesystem",
        &[place.path().to_str().unwrap()],
        json!({}),
    );
    let registered = call(
        "register_mcp_server",
        json!({"server_name": "files", "server_params": params}),
    )
    .answer();
    assert_ne!(registered["result"]["isError"], true, "{registered}");
    let write = |name: &str, form: usize, decided: Value| {
        let path = place.path().join(name);
        let code = format!(
            "from mcptools.files import write_file\nimport mcptools\n\
             try: print(write_file.run(write_file.Params(path={path:?}, \
             content='written')).content)\n\
             except mcptools.ToolCallDenied as error: print('denied:', error)"
        );
        let pending = call("execute_ipython_cell", json!({"code": code}));
        let asked = server.notification(|message| {
            message["method"] == "elicitation/create"
                && message["params"]["message"]
                    .as_str()
                    .is_some_and(|text| text.contains(name))
        });
        assert!(
            !path.exists() && !pending.is_answered(),
            "nothing happens before the answer to form {form}"
        );
        server.send_line(
            &json!({"jsonrpc": "2.0", "id": asked["id"], "result": decided}).to_string(),
        );
        let answered = pending.answer()["result"]["content"][0]["text"]
            .as_str()
            .unwrap_or_default()
            .to_owned();
        (
            asked["params"]["message"]
                .as_str()
                .unwrap_or_default()
                .to_owned(),
            answered,
            fs::read_to_string(path).ok(),
        )
    };
    let (form, said, written) = write(
        "yes.txt",
        1,
        json!({"action": "accept", "content": {"decision": "once"}}),
    );
    assert!(
        form.contains("files.write_file(") && form.contains("approve_tools: ask"),
        "{form}"
    );
    assert_eq!(written.as_deref(), Some("written"), "{said}");
    let (_, said, written) = write("no.txt", 2, json!({"action": "decline"}));
    assert!(said.starts_with("denied:") && written.is_none(), "{said}");
}
