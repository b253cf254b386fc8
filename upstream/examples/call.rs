//! Connects to an MCP server, prints what it has, and calls a tool.
//!
//!     cargo run -p cellblock-upstream --example call -- \
//!         '{"command": "uvx", "args": ["mcp-server-time"]}' \
//!         get_current_time '{"timezone": "UTC"}'
//!
//! With `--python FOLDER` in front, the generated package is written there.

use std::path::PathBuf;
use std::time::Instant;

use cellblock_upstream::{
    CallOptions, ConnectSettings, ServerName, ServerParams, Upstream, Variables,
};
use serde_json::{Map, Value};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    let folder = (arguments.first().is_some_and(|first| first == "--python")).then(|| {
        arguments.remove(0);
        PathBuf::from(arguments.remove(0))
    });
    let [params, call @ ..] = arguments.as_slice() else {
        return Err("usage: call [--python FOLDER] PARAMS [TOOL ARGUMENTS]...".into());
    };
    let params = ServerParams::parse(&serde_json::from_str(params)?)?;
    let begun = Instant::now();
    let upstream = Upstream::connect(
        &ServerName::new("example")?,
        &params,
        &ConnectSettings::new(Variables::new(std::env::vars())),
    )
    .await?;
    let info = upstream.info();
    println!(
        "{} · {:?} · {:?} · {} tools · {:?}",
        info.transport,
        info.server,
        info.era,
        info.tools.len(),
        begun.elapsed()
    );
    info.notes.iter().for_each(|note| println!("note: {note}"));
    if let Some(folder) = folder {
        for file in &upstream.package().files {
            let path = folder.join(&file.path);
            std::fs::create_dir_all(path.parent().unwrap_or(&folder))?;
            std::fs::write(path, &file.text)?;
        }
    } else if call.is_empty() {
        info.tools
            .iter()
            .for_each(|tool| println!("  {}: {}", tool.name, tool.summary));
    }
    for pair in call.chunks(2) {
        let arguments: Map<String, Value> =
            serde_json::from_str(pair.get(1).map_or("{}", String::as_str))?;
        let begun = Instant::now();
        let options = CallOptions {
            progress: Some(std::sync::Arc::new(|step| println!("  {step:?}"))),
            ..CallOptions::default()
        };
        match upstream.call(&pair[0], arguments, options).await {
            Ok(reply) => {
                let text: String = serde_json::to_string(&reply.content)?
                    .chars()
                    .take(300)
                    .collect();
                println!(
                    "{}: error {} · structured {:?} · {text} · {:?}",
                    pair[0],
                    reply.is_error,
                    reply.structured.is_some(),
                    begun.elapsed()
                );
            }
            Err(error) => println!("{}: {} ({})", pair[0], error, error.reason().as_str()),
        }
    }
    upstream.close().await;
    Ok(())
}
