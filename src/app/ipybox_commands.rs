//! `cellblock cleanup`: the equivalent of `ipybox cleanup`.
//!
//! With an image it removes only containers of that image whose server is gone. Without one it
//! removes packages that no session uses, after confirmation.

use std::io::{IsTerminal, Write};

use anyhow::Context;

use super::cli::{IpyboxCleanupArguments, PackagesCommand};
use super::output::standard_error;
use super::{image_command, packages_command};
use crate::config::Settings;
use crate::sandbox::container::remove_left_containers;

/// Removes containers of the given image, or unused packages after confirmation. Returns the
/// report.
pub(super) async fn clean_up(
    arguments: &IpyboxCleanupArguments,
    settings: &Settings,
) -> anyhow::Result<String> {
    if let Some(image) = &arguments.ancestor {
        let engine = image_command::connect(&arguments.engine, settings).await?;
        let removed = remove_left_containers(&engine, &settings.runtime_dir, image).await;
        return Ok(containers_removed(
            removed.context("the containers could not be listed")?,
            image,
        ));
    }
    let Some(unused) = packages_command::unused(settings)? else {
        return Ok("no package is unused; nothing was removed\n".to_owned());
    };
    if !arguments.yes && !confirmed(&unused)? {
        return Ok(format!(
            "{unused} are used by no session; nothing was removed. \"cellblock cleanup --yes\" \
             removes them, and \
             \"cellblock cleanup -a IMAGE\" removes containers only\n"
        ));
    }
    packages_command::execute(&PackagesCommand::Clean, settings)
}

fn containers_removed(removed: usize, image: &str) -> String {
    let count = match removed {
        0 => "no container was removed".to_owned(),
        1 => "removed 1 container".to_owned(),
        count => format!("removed {count} containers"),
    };
    format!(
        "{count}; the image {image} stays. Containers of servers that live end with their server\n"
    )
}

/// Asks on the terminal. Without a terminal, nothing is confirmed.
fn confirmed(unused: &str) -> anyhow::Result<bool> {
    if !std::io::stdin().is_terminal() || !std::io::stderr().is_terminal() {
        return Ok(false);
    }
    let mut terminal = standard_error();
    write!(
        terminal,
        "{unused} are used by no session. Remove them? [y/N] "
    )?;
    terminal.flush()?;
    let mut answer = String::new();
    std::io::stdin().read_line(&mut answer)?;
    Ok(matches!(
        answer.trim().to_ascii_lowercase().as_str(),
        "y" | "yes"
    ))
}
