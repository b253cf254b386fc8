//! An engine on another machine, over SSH.
//!
//! Each connection is a process `ssh HOST docker system dial-stdio`, as in Docker's own command
//! line. It is the operator's own `ssh`, with its configuration, keys and known hosts. It runs
//! non-interactively, because there is no terminal for questions. When our end of a connection
//! closes, `ssh` reads the end of its input and exits. So a killed server leaves no process behind,
//! and remote containers end with their standard input as everywhere.

use std::os::fd::OwnedFd;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;
use std::{fmt, io};

use bollard::Docker;
use tokio::io::AsyncReadExt;
use tokio::net::UnixStream;
use tokio::process::{Child, Command};
use tokio::sync::watch;

use super::dial::{self, Dialling};

/// Timeout for `ssh` to connect.
const CONNECT_SECONDS: u32 = 30;
/// Maximum bytes read of the error output of `ssh`.
const MAX_ERROR_OUTPUT: u64 = 8 * 1024;
/// Timeout for `ssh` to report the reason after a failure.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// The address of an engine over SSH: `ssh://[user@]host[:port][/path/of/its.sock]`.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Destination {
    user: Option<String>,
    host: String,
    port: Option<u16>,
    socket: Option<String>,
}

/// An unusable address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct BadSshAddress;

impl fmt::Display for BadSshAddress {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(
            "it is not of the form ssh://[user@]host[:port][/path/of/its.sock], without a password",
        )
    }
}

impl std::str::FromStr for Destination {
    type Err = BadSshAddress;

    fn from_str(address: &str) -> Result<Destination, BadSshAddress> {
        let rest = address.strip_prefix("ssh://").ok_or(BadSshAddress)?;
        let (authority, path) = match rest.split_once('/') {
            Some((authority, path)) => (
                authority,
                Some(format!("/{path}")).filter(|path| path != "/"),
            ),
            None => (rest, None),
        };
        let (user, place) = match authority.rsplit_once('@') {
            Some((user, place)) => (Some(user.to_owned()), place),
            None => (None, authority),
        };
        // An IPv6 address contains colons, in brackets.
        let (host, port) = match place
            .strip_prefix('[')
            .and_then(|place| place.split_once(']'))
        {
            Some((host, "")) => (host, None),
            Some((host, port)) => (host, Some(port.strip_prefix(':').ok_or(BadSshAddress)?)),
            None => place
                .split_once(':')
                .map_or((place, None), |(host, port)| (host, Some(port))),
        };
        let port = port
            .map(|port| port.parse().map_err(|_| BadSshAddress))
            .transpose()?;
        // The path is read by a remote shell, and an argument that begins with a dash is an option
        // of `ssh`.
        let is_plain = |text: &str, more: &str| {
            !text.is_empty()
                && !text.starts_with('-')
                && text
                    .chars()
                    .all(|letter| letter.is_ascii_alphanumeric() || more.contains(letter))
        };
        let fits = is_plain(host, ".-_:%")
            && user.as_deref().is_none_or(|user| is_plain(user, ".-_+$\\"))
            && path.as_deref().is_none_or(|path| is_plain(path, "/.-_+@"));
        if !fits {
            return Err(BadSshAddress);
        }
        Ok(Destination {
            user,
            host: host.to_owned(),
            port,
            socket: path,
        })
    }
}

impl Destination {
    fn arguments(&self) -> Vec<String> {
        let mut all: Vec<String> = ["-T", "-o", "BatchMode=yes", "-o"]
            .map(str::to_owned)
            .to_vec();
        all.push(format!("ConnectTimeout={CONNECT_SECONDS}"));
        all.extend(
            self.user
                .iter()
                .flat_map(|user| ["-l".to_owned(), user.clone()]),
        );
        all.extend(
            self.port
                .iter()
                .flat_map(|port| ["-p".to_owned(), port.to_string()]),
        );
        all.extend(["--".to_owned(), self.host.clone(), "docker".to_owned()]);
        all.extend(
            self.socket
                .iter()
                .flat_map(|socket| ["--host".to_owned(), format!("unix://{socket}")]),
        );
        all.extend(["system".to_owned(), "dial-stdio".to_owned()]);
        all
    }
}

/// The last error message of `ssh`. Empty as long as it has not failed.
#[derive(Clone)]
pub(super) struct SshErrors(watch::Receiver<String>);

impl SshErrors {
    /// Returns the message of `ssh` about a failure that has just been noticed, if there is one.
    pub(super) async fn message(&self) -> Option<String> {
        let mut words = self.0.clone();
        let said =
            tokio::time::timeout(LAST_WORDS, words.wait_for(|words| !words.is_empty())).await;
        said.ok()?.ok().map(|words| words.clone())
    }
}

/// Makes a client whose connections are processes. Nothing is started before the first request.
pub(super) fn client(address: &str, seconds: u64) -> Result<(Docker, SshErrors), String> {
    let destination: Destination = address
        .parse()
        .map_err(|error: BadSshAddress| error.to_string())?;
    let words = Arc::new(watch::Sender::new(String::new()));
    let ssh_errors = SshErrors(words.subscribe());
    let dial = move || -> Dialling {
        let started = start(&destination).map(|(stream, child)| {
            tokio::spawn(follow(child, words.clone()));
            stream
        });
        Box::pin(std::future::ready(started))
    };
    let docker = dial::client(dial, seconds).map_err(|error| error.to_string())?;
    Ok((docker, ssh_errors))
}

/// Starts `ssh` with one end of a socket pair as its input and output.
fn start(destination: &Destination) -> io::Result<(UnixStream, Child)> {
    let (ours, theirs) = std::os::unix::net::UnixStream::pair()?;
    ours.set_nonblocking(true)?;
    let (input, output) = (OwnedFd::from(theirs.try_clone()?), OwnedFd::from(theirs));
    let child = Command::new("ssh")
        .args(destination.arguments())
        .stdin(Stdio::from(input))
        .stdout(Stdio::from(output))
        .stderr(Stdio::piped())
        // An interrupt of the server at a terminal must not end its connections first.
        .process_group(0)
        .spawn()
        .map_err(|error| io::Error::new(error.kind(), format!("ssh cannot be started: {error}")))?;
    Ok((UnixStream::from_std(ours)?, child))
}

/// Waits for the end of one `ssh`, and keeps its error output if it failed.
async fn follow(mut child: Child, words: Arc<watch::Sender<String>>) {
    let mut said = Vec::new();
    if let Some(ssh_errors) = child.stderr.take() {
        let mut ssh_errors = ssh_errors.take(MAX_ERROR_OUTPUT);
        let _ = ssh_errors.read_to_end(&mut said).await;
        // The rest is read and discarded, so that it cannot block `ssh`.
        let _ = tokio::io::copy(&mut ssh_errors.into_inner(), &mut tokio::io::sink()).await;
    }
    let has_failed = !child.wait().await.is_ok_and(|status| status.success());
    let said = String::from_utf8_lossy(&said);
    if let Some(last) = said
        .lines()
        .map(str::trim)
        .rfind(|line| !line.is_empty())
        .filter(|_| has_failed)
    {
        words.send_replace(format!("ssh says: {last}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arguments(address: &str) -> Result<String, BadSshAddress> {
        let all = address.parse::<Destination>()?.arguments().join(" ");
        Ok(all
            .strip_prefix("-T -o BatchMode=yes -o ConnectTimeout=30 ")
            .expect("they come first")
            .to_owned())
    }

    #[test]
    fn an_address_becomes_a_command_as_docker_would_write_it() {
        assert_eq!(
            arguments("ssh://there").unwrap(),
            "-- there docker system dial-stdio"
        );
        assert_eq!(
            arguments("ssh://me@there:2222/").unwrap(),
            "-l me -p 2222 -- there docker system dial-stdio"
        );
        assert_eq!(
            arguments("ssh://me@[fd00::1]:22").unwrap(),
            "-l me -p 22 -- fd00::1 docker system dial-stdio"
        );
        assert_eq!(
            arguments("ssh://there/run/user/7/docker.sock").unwrap(),
            "-- there docker --host unix:///run/user/7/docker.sock system dial-stdio"
        );
    }

    #[test]
    fn no_address_becomes_an_option_or_a_command_of_a_shell() {
        for address in [
            "ssh://",
            "ssh://-oProxyCommand=x",
            "ssh://-l@there",
            "ssh://me:secret@there",
            "ssh://there:port",
            "ssh://[fd00::1]x",
            "ssh://there/a b",
            "ssh://there/$(reboot)",
            "ssh://there/a;b",
            "tcp://there",
        ] {
            assert_eq!(arguments(address), Err(BadSshAddress), "{address}");
        }
    }
}
