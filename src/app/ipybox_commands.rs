//! `cellblock cleanup`: what `ipybox cleanup` did, where nothing is left to clean up.

use super::cli::{IpyboxCleanupArguments, PackagesCommand};
use super::packages_command;
use crate::config::Settings;

/// Removes packages that no session uses, and says why there are no containers to remove.
pub(super) fn clean_up(arguments: &IpyboxCleanupArguments, settings: &Settings) -> anyhow::Result<String> {
    let cleaned = packages_command::execute(&PackagesCommand::Clean, settings)?;
    let image = arguments.ancestor.as_deref().map(|image| format!(", and the image {image} stays")).unwrap_or_default();
    Ok(format!(
        "{cleaned}No container was removed{image}: sandboxes end with their server, and what a server left that was killed is removed by \
         the next one.\n"
    ))
}
