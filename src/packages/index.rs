//! Package index settings: the operator's index, as uv itself is configured.
//!
//! uv reports which indexes it would use, so its configuration files, variables and defaults are
//! not parsed a second time here. uv also reports the file URLs of one package, because an index
//! may serve files from a different host than its pages. `files` caches those hosts on disk across
//! servers. `netrc` reads passwords from `.netrc`.
//!
//! An index URL may contain a password. It is passed only to the installer's sandbox: never to
//! logs, errors, the disk, or a sandbox in which package code runs. The same applies to proxy
//! addresses, because package code could reach any destination through a proxy.

mod files;
mod netrc;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::{IpAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use cellblock_egress::address;
use sha2::{Digest, Sha256};
use tokio::io::AsyncWriteExt;
use tokio::process::Command;

/// Proxy variables of uv and most other programs. Each also exists in upper case.
const PROXIES: [&str; 3] = ["http_proxy", "https_proxy", "all_proxy"];
/// Hosts that are reached without a proxy.
const NO_PROXY: &str = "no_proxy";

/// Timeout for a query to uv.
const MAX_ANSWER_TIME: Duration = Duration::from_secs(30);

/// Package indexes, their file hosts, and how TLS connections to them are verified.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IndexSettings {
    pub index_url: IndexUrl,
    /// Searched before `index_url`. A package is taken from the first index that has it.
    pub extra_index_urls: Vec<IndexUrl>,
    /// Hosts that serve files for these indexes, as `host:port`.
    pub file_hosts: Vec<String>,
    /// Hosts whose certificates are not verified.
    pub trusted_hosts: Vec<String>,
    /// A file of trusted certificates, which replaces the machine's.
    pub ca_file: Option<PathBuf>,
    pub proxies: Proxies,
}

/// Proxies for reaching the index.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Proxies {
    /// Variables for uv. They may contain passwords.
    variables: BTreeMap<&'static str, String>,
}

/// Origin of a list of file hosts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileHosts {
    /// Queried from the index.
    Asked,
    /// Cached by an earlier server. If a file is not found, query again.
    Remembered,
}

/// Error while determining the index.
#[derive(Debug, thiserror::Error)]
pub enum IndexError {
    #[error(
        "\"{0}\" is not the address of a package index; it must begin with https:// or http:// and \
         name a host"
    )]
    Address(IndexUrl),
    #[error("could not ask uv which package index it uses: {why}")]
    NoAnswer { why: String },
}

impl IndexSettings {
    /// Queries uv, run with `variables`, for the indexes that it uses. No network request is made.
    ///
    /// `variables` are those that environment installers run with, in which pip's settings have
    /// uv's names. `python` is any interpreter on the host.
    pub async fn read(
        uv: &Path,
        python: &Path,
        variables: &BTreeMap<String, String>,
    ) -> Result<IndexSettings, IndexError> {
        let told = ask(
            uv,
            python,
            variables,
            "",
            &["--offline", "--emit-index-url"],
        )
        .await
        .map_err(|why| IndexError::NoAnswer { why })?;
        let (index, extra) = urls_in(&told);
        let index_url = index.ok_or_else(|| IndexError::NoAnswer {
            why: "it named none".to_owned(),
        })?;
        let passwords = netrc::read(variables);
        let address = |text: &str| Ok(IndexUrl::parse(text)?.with_password_of(&passwords));
        let words = |name: &str| {
            let value = variables.get(name).map_or("", String::as_str);
            value
                .split([' ', ','])
                .filter(|word| !word.is_empty())
                .map(str::to_owned)
                .collect::<Vec<_>>()
        };
        Ok(IndexSettings {
            index_url: address(index_url)?,
            extra_index_urls: extra.into_iter().map(address).collect::<Result<_, _>>()?,
            file_hosts: Vec::new(),
            trusted_hosts: words("UV_INSECURE_HOST"),
            ca_file: variables
                .get("SSL_CERT_FILE")
                .filter(|path| !path.is_empty())
                .map(PathBuf::from),
            proxies: Proxies::of(variables),
        })
    }

    /// Loads the file hosts of these indexes from the cache directory `memory`. Returns whether
    /// they were cached.
    pub fn recall_file_hosts(&mut self, memory: &Path) -> bool {
        let hosts = files::recall(memory, &self.identity());
        let is_known = hosts.is_some();
        self.file_hosts = hosts.unwrap_or_default();
        is_known
    }

    /// Determines the file hosts of these indexes, from the cache directory `memory` or by querying
    /// the index for one package.
    pub async fn find_file_hosts(
        &mut self,
        uv: &Path,
        python: &Path,
        variables: &BTreeMap<String, String>,
        memory: &Path,
    ) -> FileHosts {
        if self.recall_file_hosts(memory) {
            return FileHosts::Remembered;
        }
        // An index without this package still works; its files are then expected on the host of its
        // pages.
        if let Ok(lock) = ask(uv, python, variables, files::KNOWN_PACKAGE, &files::OPTIONS).await {
            self.file_hosts = files::hosts_in(&lock);
            files::remember(memory, &self.identity(), &self.file_hosts);
        }
        FileHosts::Asked
    }

    /// Removes the cached file hosts from `memory`.
    pub fn forget_file_hosts(&self, memory: &Path) {
        files::forget(memory, &self.identity());
    }

    /// Returns the ports of all hosts in these settings.
    pub fn ports(&self) -> BTreeSet<u16> {
        self.places().into_iter().map(|(_, port)| port).collect()
    }

    /// Returns the egress rules of the installer's sandbox. This resolves host names, so it may
    /// block briefly.
    ///
    /// A rule for a name does not permit private addresses. An index on a private address is the
    /// operator's own, so its address is listed as well.
    pub fn rules(&self) -> Vec<String> {
        self.places()
            .iter()
            .flat_map(|(host, port)| rules_for(host, *port, addresses_of))
            .collect()
    }

    /// Returns whether any index URL contains a password.
    pub fn has_credentials(&self) -> bool {
        self.urls().any(|url| url.credentials().is_some())
    }

    /// Masks every password and user name of these URLs in a text that others will read.
    pub fn mask(&self, text: &str) -> String {
        let mut text = text.to_owned();
        let proxies = self.proxies.urls();
        for credentials in self
            .urls()
            .chain(&proxies)
            .filter_map(IndexUrl::credentials)
        {
            let (user, password) = credentials.split_once(':').unwrap_or((credentials, ""));
            // A token may be a user name without a password. Short user names are ordinary words
            // and not secret.
            let parts = [
                credentials,
                password,
                if password.is_empty() { user } else { "" },
            ];
            for part in parts.into_iter().filter(|part| !part.is_empty()) {
                text = text.replace(part, "****").replace(&decoded(part), "****");
            }
        }
        text
    }

    /// Returns the identity of these indexes for the store. Credentials are not part of it: they
    /// grant access and do not select the index.
    pub(super) fn identity(&self) -> String {
        let urls: Vec<String> = self.urls().map(IndexUrl::without_credentials).collect();
        Sha256::digest(urls.join("\n"))
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect()
    }

    /// Returns the variables that configure uv with these settings. They contain passwords.
    pub(super) fn variables(&self) -> BTreeMap<&'static str, String> {
        let extra: Vec<&str> = self
            .extra_index_urls
            .iter()
            .map(|url| url.0.as_str())
            .collect();
        let settings = [
            ("UV_DEFAULT_INDEX", self.index_url.0.clone()),
            ("UV_INDEX", extra.join(" ")),
            ("UV_INSECURE_HOST", self.trusted_hosts.join(" ")),
        ];
        let settings = settings.into_iter().filter(|(_, value)| !value.is_empty());
        settings.chain(self.proxies.variables.clone()).collect()
    }

    fn places(&self) -> BTreeSet<(String, u16)> {
        let of_files = self
            .file_hosts
            .iter()
            .filter_map(|place| place.rsplit_once(':'));
        let of_files =
            of_files.filter_map(|(host, port)| Some((host.to_owned(), port.parse().ok()?)));
        let proxies = self.proxies.urls();
        self.urls()
            .chain(&proxies)
            .map(IndexUrl::place)
            .chain(of_files)
            .collect()
    }

    fn urls(&self) -> impl Iterator<Item = &IndexUrl> {
        std::iter::once(&self.index_url).chain(&self.extra_index_urls)
    }
}

impl Proxies {
    /// Finds the proxies among `variables`. The lower-case name takes precedence, as in most
    /// programs.
    fn of(variables: &BTreeMap<String, String>) -> Proxies {
        let value = |name: &str| {
            variables
                .get(name)
                .or_else(|| variables.get(&name.to_ascii_uppercase()))
        };
        let named = |name: &'static str| {
            Some((name, value(name).filter(|value| !value.is_empty())?.clone()))
        };
        let variables: BTreeMap<_, _> = PROXIES.into_iter().filter_map(named).collect();
        if variables.is_empty() {
            return Proxies::default();
        }
        Proxies {
            variables: variables.into_iter().chain(named(NO_PROXY)).collect(),
        }
    }

    /// Returns whether no proxy is set.
    pub fn is_empty(&self) -> bool {
        self.variables.is_empty()
    }

    /// Returns the proxy URLs. A value without a scheme means plain HTTP. Invalid values are left
    /// out; uv reports them.
    fn urls(&self) -> Vec<IndexUrl> {
        let values = PROXIES.iter().filter_map(|name| self.variables.get(name));
        let whole = |value: &String| {
            if value.contains("://") {
                value.clone()
            } else {
                format!("http://{value}")
            }
        };
        values
            .filter_map(|value| IndexUrl::parse(&whole(value)).ok())
            .collect()
    }
}

impl fmt::Debug for Proxies {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_list().entries(self.urls()).finish()
    }
}

/// URL of an index. Its display form omits the credentials before the `@`.
#[derive(Clone, PartialEq, Eq)]
pub struct IndexUrl(String);

impl IndexUrl {
    /// Parses a URL: `http` or `https`, a host, and an optional port.
    pub fn parse(text: &str) -> Result<IndexUrl, IndexError> {
        let url = IndexUrl(text.trim().to_owned());
        let is_plain = url.0.chars().all(|letter| ('!'..='~').contains(&letter));
        let has_scheme = url.0.starts_with("https://") || url.0.starts_with("http://");
        let (host, port) = if is_plain && has_scheme {
            url.place()
        } else {
            (String::new(), 0)
        };
        if host.is_empty() || port == 0 {
            Err(IndexError::Address(url))
        } else {
            Ok(url)
        }
    }

    /// Splits into scheme, credentials before the `@`, host with port, and path.
    fn pieces(&self) -> (&str, Option<&str>, &str, &str) {
        let (scheme, rest) = self.0.split_once("://").unwrap_or(("https", &self.0));
        let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
        let (authority, path) = rest.split_at(end);
        let (credentials, authority) = authority
            .rsplit_once('@')
            .map_or((None, authority), |(before, after)| (Some(before), after));
        (scheme, credentials, authority, path)
    }

    /// Adds the host's user name and password, unless this URL has credentials.
    fn with_password_of(self, passwords: &netrc::Passwords) -> IndexUrl {
        let (scheme, credentials, authority, path) = self.pieces();
        match passwords
            .get(&self.place().0)
            .filter(|_| credentials.is_none())
        {
            Some(known) => IndexUrl(format!("{scheme}://{known}@{authority}{path}")),
            None => self,
        }
    }

    fn credentials(&self) -> Option<&str> {
        self.pieces()
            .1
            .filter(|credentials| !credentials.is_empty())
    }

    fn without_credentials(&self) -> String {
        let (scheme, _, authority, path) = self.pieces();
        format!(
            "{scheme}://{}{}",
            authority.to_ascii_lowercase(),
            path.trim_end_matches('/')
        )
    }

    /// Returns host and port. An invalid port gives 0.
    fn place(&self) -> (String, u16) {
        let (scheme, _, authority, _) = self.pieces();
        let usual = if scheme == "http" { 80 } else { 443 };
        let (host, port) = match authority.rsplit_once(':') {
            Some((host, port)) if !port.ends_with(']') => (host, port.parse().unwrap_or(0)),
            _ => (authority, usual),
        };
        (
            host.trim_start_matches('[')
                .trim_end_matches(']')
                .to_ascii_lowercase(),
            port,
        )
    }
}

impl fmt::Display for IndexUrl {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.without_credentials())
    }
}

impl fmt::Debug for IndexUrl {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "IndexUrl({self})")
    }
}

/// Runs `uv pip compile` on one line and returns its output.
async fn ask(
    uv: &Path,
    python: &Path,
    variables: &BTreeMap<String, String>,
    line: &str,
    options: &[&str],
) -> Result<String, String> {
    let mut child = Command::new(uv)
        .args([
            "pip",
            "compile",
            "--quiet",
            "--no-header",
            "--no-build",
            "--python",
        ])
        .arg(python)
        .args(options)
        .arg("-")
        .env_clear()
        .envs(variables)
        // The current directory may contain a uv.toml, which must not apply.
        .current_dir("/")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .map_err(|error| format!("it cannot be run: {error}"))?;
    let mut input = child.stdin.take().expect("standard input was asked for");
    let conversation = async move {
        // If uv exits without reading its input, its standard error has the reason.
        let _ = input.write_all(format!("{line}\n").as_bytes()).await;
        drop(input);
        child.wait_with_output().await
    };
    let answer = tokio::time::timeout(MAX_ANSWER_TIME, conversation).await;
    let answer = answer
        .map_err(|_| "it did not answer".to_owned())?
        .map_err(|error| error.to_string())?;
    if answer.status.success() {
        Ok(String::from_utf8_lossy(&answer.stdout).into_owned())
    } else {
        Err(String::from_utf8_lossy(&answer.stderr).trim().to_owned())
    }
}

/// Finds the indexes in a compiled file: the default index and the others, in order.
fn urls_in(compiled: &str) -> (Option<&str>, Vec<&str>) {
    let index = compiled
        .lines()
        .find_map(|line| line.strip_prefix("--index-url "));
    (
        index,
        compiled
            .lines()
            .filter_map(|line| line.strip_prefix("--extra-index-url "))
            .collect(),
    )
}

fn rules_for(host: &str, port: u16, addresses: impl Fn(&str, u16) -> Vec<IpAddr>) -> Vec<String> {
    let listed = |address: IpAddr| match address {
        IpAddr::V4(address) => format!("{address}:{port}"),
        IpAddr::V6(address) => format!("[{address}]:{port}"),
    };
    if let Ok(address) = host.parse::<IpAddr>() {
        return vec![listed(address)];
    }
    let private: BTreeSet<IpAddr> = addresses(host, port)
        .into_iter()
        .filter(|address| is_own(*address))
        .collect();
    std::iter::once(format!("{host}:{port}"))
        .chain(private.into_iter().map(listed))
        .collect()
}

fn addresses_of(host: &str, port: u16) -> Vec<IpAddr> {
    (host, port).to_socket_addrs().map_or_else(
        |_| Vec::new(),
        |found| found.map(|place| place.ip()).collect(),
    )
}

/// Returns whether an address is non-public but may host an operator's own index. Link-local
/// addresses are excluded, because metadata services use them.
fn is_own(address: IpAddr) -> bool {
    let is_link_local = match address.to_canonical() {
        IpAddr::V4(address) => address.is_link_local(),
        IpAddr::V6(address) => address.is_unicast_link_local(),
    };
    address::special(address).is_some_and(|why| !why.contains("metadata")) && !is_link_local
}

/// Percent-decodes a text. Invalid sequences stay unchanged.
fn decoded(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut plain = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let code = text.get(at + 1..at + 3).filter(|_| bytes[at] == b'%');
        match code.and_then(|code| u8::from_str_radix(code, 16).ok()) {
            Some(byte) => {
                plain.push(byte);
                at += 3;
            }
            None => {
                plain.push(bytes[at]);
                at += 1;
            }
        }
    }
    String::from_utf8_lossy(&plain).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(index: &str, extra: &[&str]) -> IndexSettings {
        IndexSettings {
            index_url: IndexUrl::parse(index).unwrap(),
            extra_index_urls: extra
                .iter()
                .map(|url| IndexUrl::parse(url).unwrap())
                .collect(),
            file_hosts: Vec::new(),
            trusted_hosts: Vec::new(),
            ca_file: None,
            proxies: Proxies::default(),
        }
    }

    #[test]
    fn what_uv_tells_is_read() {
        let told =
            "--index-url https://a.example/simple\n--extra-index-url https://b.example/x\n\nx==1\n";
        assert_eq!(
            urls_in(told),
            (
                Some("https://a.example/simple"),
                vec!["https://b.example/x"]
            )
        );
    }

    #[test]
    fn addresses_must_be_those_of_a_web_server() {
        for bad in [
            "",
            "x",
            "ftp://x/",
            "https://",
            "https:///x",
            "file:///x",
            "https://h:x/",
            "https://h:99999/",
            "http://a b/",
        ] {
            assert!(IndexUrl::parse(bad).is_err(), "{bad:?}");
        }
        let places = [
            ("https://Host.example/simple", ("host.example", 443)),
            ("http://u:p@host.example", ("host.example", 80)),
            ("http://127.0.0.1:8080/x", ("127.0.0.1", 8080)),
            ("https://[::1]:8443/x", ("::1", 8443)),
            ("https://[::1]/x", ("::1", 443)),
        ];
        for (text, (host, port)) in places {
            assert_eq!(
                IndexUrl::parse(text).unwrap().place(),
                (host.to_owned(), port),
                "{text}"
            );
        }
    }

    #[test]
    fn a_rule_lists_the_address_too_when_the_index_is_private() {
        let look_up = |host: &str, _: u16| {
            let addresses: &[&str] = match host {
                "private.example" => &["10.0.0.7", "fd00::7"],
                "metadata.example" => &["169.254.169.254", "fe80::1"],
                _ => &["93.184.216.34"],
            };
            addresses
                .iter()
                .map(|address| address.parse().unwrap())
                .collect()
        };
        assert_eq!(
            rules_for("public.example", 443, look_up),
            ["public.example:443"]
        );
        let private = ["private.example:8443", "10.0.0.7:8443", "[fd00::7]:8443"];
        assert_eq!(rules_for("private.example", 8443, look_up), private);
        assert_eq!(
            rules_for("metadata.example", 80, look_up),
            ["metadata.example:80"]
        );
        assert_eq!(rules_for("127.0.0.1", 8080, look_up), ["127.0.0.1:8080"]);
        assert_eq!(rules_for("::1", 8080, look_up), ["[::1]:8080"]);
    }

    #[test]
    fn all_hosts_of_all_indexes_are_in_the_rules_once() {
        let mut settings = settings(
            "http://127.0.0.1:81/simple",
            &["http://u:p@127.0.0.1:82/x", "http://127.0.0.1:82/y"],
        );
        settings.file_hosts = vec!["127.0.0.2:80".to_owned()];
        assert_eq!(
            settings.rules(),
            ["127.0.0.1:81", "127.0.0.1:82", "127.0.0.2:80"]
        );
    }

    #[test]
    fn a_password_is_shown_nowhere() {
        let settings = settings(
            "https://me:s3cr%40t@a.example/simple",
            &["https://tok3n@b.example/"],
        );
        assert!(settings.has_credentials());
        let shown = format!("{settings:?} {}", settings.index_url);
        assert!(
            !shown.contains("s3cr") && !shown.contains("tok3n"),
            "{shown}"
        );
        let said = "could not fetch https://me:s3cr%40t@a.example/x (s3cr@t) with tok3n";
        assert_eq!(
            settings.mask(said),
            "could not fetch https://****@a.example/x (****) with ****"
        );
        assert!(
            settings.variables()["UV_DEFAULT_INDEX"].contains("s3cr%40t"),
            "the installer gets it"
        ); // control
    }

    #[test]
    fn an_index_is_known_by_its_address_and_not_by_its_password() {
        let one = settings("https://me:a@a.example/simple/", &[]);
        assert_eq!(
            one.identity(),
            settings("https://A.example/simple", &[]).identity()
        );
        assert_ne!(
            one.identity(),
            settings("https://a.example/other", &[]).identity()
        );
        assert_ne!(
            one.identity(),
            settings("https://a.example/simple", &["https://b.example/"]).identity()
        );
    }

    fn variables(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect()
    }

    #[test]
    fn a_proxy_is_reached_and_told_to_uv_and_its_password_is_shown_nowhere() {
        let mut settings = settings("https://127.0.0.1/simple", &[]);
        assert_eq!(settings.ports(), BTreeSet::from([443]));
        let pairs = [
            ("HTTPS_PROXY", "http://me:s3cr3t@127.0.0.2:3128"),
            ("NO_PROXY", "a.example"),
            ("http_proxy", ""),
        ];
        settings.proxies = Proxies::of(&variables(&pairs));
        assert_eq!(settings.rules(), ["127.0.0.1:443", "127.0.0.2:3128"]);
        assert_eq!(settings.ports(), BTreeSet::from([443, 3128]));
        let told = settings.variables();
        assert_eq!(
            (told["https_proxy"].as_str(), told["no_proxy"].as_str()),
            (pairs[0].1, "a.example")
        );
        assert!(!told.contains_key("http_proxy"));
        assert!(!format!("{settings:?}").contains("s3cr3t"));
        assert_eq!(
            settings.mask("no answer from me:s3cr3t@127.0.0.2"),
            "no answer from ****@127.0.0.2"
        );
    }

    #[test]
    fn a_proxy_needs_no_scheme_and_the_name_in_small_letters_counts() {
        let proxies = Proxies::of(&variables(&[
            ("all_proxy", "proxy.example:8080"),
            ("ALL_PROXY", "http://other:1"),
        ]));
        assert_eq!(
            proxies.urls(),
            [IndexUrl::parse("http://proxy.example:8080").unwrap()]
        );
        assert!(Proxies::of(&variables(&[("NO_PROXY", "a.example")])).is_empty());
    }

    #[test]
    fn a_password_from_elsewhere_is_added_to_addresses_without_one() {
        let passwords = netrc::Passwords::from([("a.example".to_owned(), "me:p%40ss".to_owned())]);
        let with = |url: &str| IndexUrl::parse(url).unwrap().with_password_of(&passwords).0;
        assert_eq!(
            with("https://A.example:8443/simple"),
            "https://me:p%40ss@A.example:8443/simple"
        );
        assert_eq!(
            with("https://you:x@a.example/simple"),
            "https://you:x@a.example/simple"
        );
        assert_eq!(with("https://b.example/simple"), "https://b.example/simple");
    }
}
