//! `cellblock build` and `cellblock cleanup`: what `ipybox build` and `ipybox cleanup` did, without containers.
//!
//! An image with dependencies is an environment here, and its name is made of the tag; `--container-tag` finds it by the same rule. No
//! container is ever left behind, so that cleaning up removes packages that no session uses.

use std::io::Write;

use anyhow::{Context, bail};

use super::cli::{
    BuildArguments, EnvCommand, IpyboxBuildArguments, IpyboxCleanupArguments, PackagesCommand, environment_of,
};
use super::{env_command, packages_command};
use crate::config::Settings;

/// Builds the environment that stands in for an image.
pub(super) async fn build(
    arguments: &IpyboxBuildArguments,
    settings: &Settings,
    output: &mut (dyn Write + Send),
) -> anyhow::Result<()> {
    let name = environment_of(&arguments.tag);
    if name.is_empty() {
        bail!("--tag {}: it holds no letter, so that no environment can be named after it", arguments.tag);
    }
    let mut packages = vec!["ipython".to_owned()];
    if let Some(file) = &arguments.dependencies {
        let text = std::fs::read_to_string(file).with_context(|| format!("could not read {}", file.display()))?;
        packages.extend(requirements(&text).map_err(|line| {
            anyhow::anyhow!("{} line {line}: a line is a requirement in quotes, with a comma behind it", file.display())
        })?);
    }
    let wanted = BuildArguments { name: Some(name.clone()), packages, ..BuildArguments::default() };
    env_command::execute(EnvCommand::Build(wanted), settings, output).await?;
    writeln!(output, "use it with: cellblock mcp --profile ipybox --environment {name}")?;
    Ok(())
}

/// Reads lines of a TOML array: `"numpy>=2",`. Returns the number of the first line that is none.
fn requirements(text: &str) -> Result<Vec<String>, usize> {
    let mut found = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let line = line.strip_suffix(',').unwrap_or(line).trim_end();
        let unquoted = ['"', '\''].iter().find_map(|quote| line.strip_prefix(*quote)?.strip_suffix(*quote));
        match unquoted.filter(|text| !text.is_empty() && !text.contains(['"', '\\'])) {
            Some(requirement) => found.push(requirement.to_owned()),
            None => return Err(index + 1),
        }
    }
    Ok(found)
}

/// Removes what nothing uses, and says why there is nothing else to remove.
pub(super) fn clean_up(arguments: &IpyboxCleanupArguments, settings: &Settings) -> anyhow::Result<String> {
    let cleaned = packages_command::execute(&PackagesCommand::Clean, settings)?;
    let name = environment_of(&arguments.ancestor);
    Ok(format!(
        "{cleaned}There are no containers: sandboxes end with their server. An environment that was built for an image is removed with: \
         cellblock env remove {name}\n"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_an_array_are_requirements() {
        let text = "# tools\n\"numpy>=2\",\n  'pandas[excel] >=2,<3' ,\n\n\"scipy\"\n";
        assert_eq!(requirements(text).unwrap(), ["numpy>=2", "pandas[excel] >=2,<3", "scipy"]);
        assert_eq!(requirements("").unwrap(), Vec::<String>::new());
        assert_eq!(requirements("\"numpy\",\nnumpy = \"^2\"\n"), Err(2));
        assert_eq!(requirements("scipy"), Err(1));
    }
}
