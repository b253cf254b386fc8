//! Makes the package of a server from the tools that it lists: `from_list NAME FOLDER <
//! tools.json`, where the input is the array that `tools/list` returns. Prints what is not as the
//! server said it, and how long making it took.

use std::error::Error;
use std::path::Path;
use std::time::Instant;

use cellblock_typed::{ServerName, ToolSchema, generate, index};
use serde_json::Value;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, name, folder] = arguments.as_slice() else {
        return Err("usage: from_list NAME FOLDER < tools.json".into());
    };
    let listed: Vec<Value> = serde_json::from_reader(std::io::stdin().lock())?;
    let text = |tool: &Value, key: &str| tool.get(key).and_then(Value::as_str).map(str::to_owned);
    let tool = |tool: &Value| ToolSchema {
        name: text(tool, "name").unwrap_or_default(),
        title: text(tool, "title"),
        description: text(tool, "description"),
        input: tool["inputSchema"].clone(),
        output: tool.get("outputSchema").cloned(),
    };
    let tools: Vec<ToolSchema> = listed.iter().map(tool).collect();
    let begun = Instant::now();
    let package = generate(&ServerName::new(name)?, &tools)?;
    eprintln!(
        "{name}: {} of {} tools in {:?}",
        package.tools.len(),
        tools.len(),
        begun.elapsed()
    );
    for file in package.files.iter().chain([&index(&[&package])]) {
        let path = Path::new(folder).join(&file.path);
        std::fs::create_dir_all(path.parent().expect("it is in a folder"))?;
        std::fs::write(path, &file.text)?;
    }
    for note in &package.notes {
        eprintln!("{note}");
    }
    Ok(())
}
