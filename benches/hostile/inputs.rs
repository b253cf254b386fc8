//! The inputs. What one of them is answered with does not matter here, only what it costs others.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use crate::http_client::HttpClient;
use crate::service::{Key, Service};

type Sending = Pin<Box<dyn Future<Output = anyhow::Result<()>>>>;

pub(crate) struct Input {
    pub(crate) name: &'static str,
    /// Lines of the configuration.
    pub(crate) settings: &'static str,
    pub(crate) send: fn(Arc<Service>) -> Sending,
}

const MANY_SERVER: &str = "mcp_servers:\n  many:\n    command: python3\n    args: [SCRIPT]\n";

pub(crate) const INPUTS: [Input; 14] = [
    Input {
        name: "frame of text, 24 MiB (control)",
        settings: "",
        send: |service| cell(service, FRAME_OF_TEXT),
    },
    Input {
        name: "frame of objects, 31 MiB",
        settings: "",
        send: |service| cell(service, FRAME_OF_OBJECTS),
    },
    Input {
        name: "frames of objects, 60 KiB each",
        settings: "",
        send: |service| cell(service, SMALL_FRAMES),
    },
    Input {
        name: "frame of one deep list",
        settings: "",
        send: |service| cell(service, FRAME_OF_DEPTH),
    },
    Input {
        name: "frame of huge numbers",
        settings: "",
        send: |service| cell(service, FRAME_OF_DIGITS),
    },
    Input {
        name: "flood of markers",
        settings: "",
        send: |service| cell(service, MARKERS),
    },
    Input {
        name: "png of 16,000 x 16,000",
        settings: "",
        send: |service| cell(service, PICTURES),
    },
    Input {
        name: "parked questions of 30 MB",
        settings: "approve_packages: ask\n",
        send: |service| cell(service, QUESTIONS),
    },
    Input {
        name: "upstream result of objects, 14 MB",
        settings: MANY_SERVER,
        send: |service| cell(service, UPSTREAM_RESULT),
    },
    Input {
        name: "bodies of objects, read-only key",
        settings: "",
        send: |service| bodies(service, Key::Reader, objects),
    },
    Input {
        name: "bodies of objects",
        settings: "",
        send: |service| bodies(service, Key::Attacker, objects),
    },
    Input {
        name: "bodies of many keys",
        settings: "",
        send: |service| bodies(service, Key::Attacker, keys),
    },
    Input {
        name: "bodies that never end, 200",
        settings: "",
        send: |service| Box::pin(unfinished(service)),
    },
    Input {
        name: "idle connections, 500",
        settings: "",
        send: |service| Box::pin(idle_connections(service)),
    },
];

const MAX_BODY_BYTES: usize = 8 * 1024 * 1024;

/// Finds the channel to the server: the last socket that the session was born with.
const CHANNEL: &str = r#"
import gc, os, socket, stat, struct, sys, threading, time, zlib
from cellblock_runner import host_calls
cell = host_calls._active._execution
channel = max(
    int(name) for name in os.listdir('/proc/self/fd')
    if os.path.exists(f'/proc/self/fd/{name}') and stat.S_ISSOCK(os.fstat(int(name)).st_mode)
)
def send(header):
    data = memoryview(struct.pack('>II', 4 + len(header), len(header)) + header)
    while data:
        data = data[os.write(channel, data):]
def value(data):
    send(b'{"type":"display","id":%d,"data":{"application/json":%b}}' % (cell, data))
"#;

const FRAME_OF_TEXT: &str = "value(b'\"' + b'x' * (24 << 20) + b'\"')";
const FRAME_OF_OBJECTS: &str = "value(b'[' + b'{\"\":0},' * (31 * (1 << 20) // 7) + b'0]')";
const SMALL_FRAMES: &str =
    "for _ in range(200): value(b'[' + b'{\"\":0},' * (60 * 1024 // 7) + b'0]')";
const FRAME_OF_DEPTH: &str = "value(b'[' * (31 << 20))";
const FRAME_OF_DIGITS: &str = "value(b'[' + b','.join([b'9' * (1 << 20)] * 30) + b']')";
/// True markers that contradict each other: earlier ones in one pipe, later ones in the other.
const MARKERS: &str = r#"
streams = next(
    o for o in gc.get_objects() if '_marker_start' in (getattr(o, '__dict__', None) or {})
)
def flood(descriptor, seq):
    data = (streams._marker_start + seq.to_bytes(4, 'big') + b'P\n') * 2000
    end = time.monotonic() + 5
    while time.monotonic() < end:
        os.write(descriptor, data)
threads = [threading.Thread(target=flood, args=place) for place in [(1, 1), (2, 5)]]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"#;
/// Three pictures of one bit per pixel, 31 KB each.
const PICTURES: &str = r#"
from IPython.display import Image, display
def chunk(kind, data):
    return struct.pack('>I', len(data)) + kind + data + struct.pack('>I', zlib.crc32(kind + data))
size = 16000
png = (b'\x89PNG\r\n\x1a\n' + chunk(b'IHDR', struct.pack('>IIBBBBB', size, size, 1, 0, 0, 0, 0))
       + chunk(b'IDAT', zlib.compress(bytes(size * (1 + size // 8)), 9)) + chunk(b'IEND', b''))
for _ in range(3): display(Image(data=png))
"#;
const QUESTIONS: &str = r#"
for number in range(8):
    send(
        b'{"type":"ask","id":%d,"ask":%d,"what":"install","requirements":["%b"],"options":{}}'
        % (cell, 1000 + number, b'x' * 30_000_000)
    )
"#;
const UPSTREAM_RESULT: &str = r#"
from mcptools.many import many
try: print(len(str(many.run(many.Params()))))
except Exception as error: print(error)
"#;

/// Runs a cell as the attacker.
fn cell(service: Arc<Service>, code: &'static str) -> Sending {
    Box::pin(async move {
        let mut client =
            HttpClient::connect(service.address, Some(service.key(Key::Attacker))).await?;
        let arguments =
            json!({"code": format!("{CHANNEL}\n{code}"), "session_id": "attacker", "timeout": 60});
        let (result, _) = client.call("execute_ipython_cell", &arguments).await?;
        if std::env::var_os("BENCH_TELL").is_some() {
            let told = result.to_string();
            println!("    {}", &told[..told.floor_char_boundary(600)]);
        }
        Ok(())
    })
}

fn objects() -> String {
    r#"{"":0},"#.repeat((MAX_BODY_BYTES - 1000) / 7)
}

fn keys() -> String {
    let mut text = String::from("{");
    for number in 0.. {
        if text.len() > MAX_BODY_BYTES - 1000 {
            break;
        }
        text += &format!("\"{number:x}\":0,");
    }
    text + "\"\":0},"
}

/// Posts three bodies of nearly 8 MiB at once.
fn bodies(service: Arc<Service>, key: Key, many: fn() -> String) -> Sending {
    Box::pin(async move {
        let head = concat!(
            r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","#,
            r#""params":{"name":"list_sessions","arguments":{"x":["#
        );
        let body = Arc::new(format!("{head}{}0]}}}}}}", many()));
        let mut posts = JoinSet::new();
        for _ in 0..3 {
            posts.spawn(post(service.clone(), key, body.clone(), body.len()));
        }
        while let Some(done) = posts.join_next().await {
            done??;
        }
        Ok(())
    })
}

/// Announces a body and sends some of it; then waits for the answer, if all was sent, or a while.
async fn post(
    service: Arc<Service>,
    key: Key,
    body: Arc<String>,
    announced: usize,
) -> anyhow::Result<()> {
    let mut stream = TcpStream::connect(service.address).await?;
    let head = format!(
        "POST /mcp HTTP/1.1\r\nhost: {}\r\nauthorization: Bearer {}\r\ncontent-type: \
         application/json\r\n\
         accept: application/json, text/event-stream\r\nconnection: close\r\ncontent-length: \
         {announced}\r\n\r\n",
        service.address,
        service.key(key),
    );
    // The server may have answered and closed before all of it was written.
    let written = async {
        stream.write_all(head.as_bytes()).await?;
        stream.write_all(body.as_bytes()).await
    };
    if written.await.is_err() {
        return Ok(());
    }
    let mut answer = Vec::new();
    let patience = Duration::from_secs(if announced == body.len() { 60 } else { 3 });
    if let Ok(read) = tokio::time::timeout(patience, stream.read_to_end(&mut answer)).await {
        // A connection that was reset is an answer too.
        let _ = read;
    }
    Ok(())
}

async fn unfinished(service: Arc<Service>) -> anyhow::Result<()> {
    let body = Arc::new("x".repeat(MAX_BODY_BYTES - 1));
    let mut posts = JoinSet::new();
    for _ in 0..200 {
        posts.spawn(post(
            service.clone(),
            Key::Attacker,
            body.clone(),
            MAX_BODY_BYTES,
        ));
    }
    while let Some(done) = posts.join_next().await {
        done??;
    }
    Ok(())
}

async fn idle_connections(service: Arc<Service>) -> anyhow::Result<()> {
    let mut open = Vec::new();
    for _ in 0..500 {
        let mut client = HttpClient::connect(service.address, None).await?;
        client.get("/healthz").await?;
        open.push(client);
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    Ok(())
}
