//! Requests to the installer script and its replies, as JSON.
//!
//! A reply is a claim. Its size is limited and its form is checked here; `installer` compares it
//! with the request.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::requirement::{is_name, is_version, normalised};

/// File with the request.
pub(super) const REQUEST_FILE: &str = "request.json";
/// File with the reply.
pub(super) const ANSWER_FILE: &str = "answer.json";
/// File with the certificates of the index.
pub(super) const CERTIFICATES_FILE: &str = "certificates.pem";
/// Maximum size of a reply. A reply with ten thousand packages is smaller.
pub(super) const MAX_ANSWER_BYTES: u64 = 4 << 20;
/// Maximum number of distributions in one installation.
const MAX_PACKAGES: usize = 2_000;

/// Maximum number of remarks about older versions in a reply, and of packages in each remark.
const MAX_REMARKS: usize = 5;

/// Returns the name of the file with the stream of the package with this number.
pub(super) fn stream_file(number: usize) -> String {
    format!("package-{number}.stream")
}

/// A request to `installer.py`.
#[derive(Debug, Serialize)]
pub(super) struct InstallerRequest<'a> {
    #[serde(flatten)]
    pub(super) step: InstallerStep<'a>,
    /// The path of uv inside.
    pub(super) uv: &'a str,
    /// Index settings, as variables of uv.
    pub(super) variables: &'a BTreeMap<&'static str, String>,
    /// File with the certificates of the index, if it has its own.
    pub(super) certificates: Option<&'static str>,
}

#[derive(Debug, Serialize)]
#[serde(tag = "step", rename_all = "lowercase")]
pub(super) enum InstallerStep<'a> {
    /// Resolves versions and hashes, from wheels only.
    Resolve(WantedPackages<'a>),
    /// Installs exactly these wheels and writes a stream of each.
    Install { pins: &'a [Pin] },
    /// Resolves versions, builds packages without a wheel, and writes a stream of each package that
    /// the session does not have.
    Build(WantedPackages<'a>),
}

#[derive(Debug, Serialize)]
pub(super) struct WantedPackages<'a> {
    pub(super) requirements: Vec<&'a str>,
    /// The session's packages: name to version.
    pub(super) present: BTreeMap<&'a str, &'a str>,
    /// Names among the requirements. Only these may be replaced by another version.
    pub(super) named: Vec<&'a str>,
    pub(super) upgrade: bool,
}

/// One package version, chosen by the resolver.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(super) struct Pin {
    pub(super) name: String,
    /// `None` for a wheel requested by URL.
    pub(super) version: Option<String>,
    pub(super) url: Option<String>,
    /// `sha256:…`. The installer accepts only a file that has one of these hashes.
    pub(super) hashes: Vec<String>,
}

/// Reply of the resolver.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(super) struct Resolved {
    /// All properties of Python and the machine that determine which wheels are compatible.
    pub(super) tag: String,
    pub(super) pins: Vec<Pin>,
    /// Requested packages that are held back at an older version.
    #[serde(default)]
    pub(super) held_back: Vec<HeldBack>,
}

/// A package that is held back at an older version, because a newer one is incompatible with
/// packages that the session has.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(super) struct HeldBack {
    pub(super) name: String,
    pub(super) version: String,
    /// The version that would be chosen otherwise.
    pub(super) newer: String,
    /// Packages of the session that the newer version would replace.
    pub(super) replaced: Vec<Replaced>,
}

/// A package of the session that another version would replace.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(super) struct Replaced {
    pub(super) name: String,
    pub(super) version: String,
    pub(super) wanted: String,
}

/// A package with a written stream.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(super) struct Packed {
    pub(super) name: String,
    pub(super) version: String,
}

/// A reply, or the reason for its absence.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum InstallerReply<T> {
    Failed {
        /// Output of uv.
        failed: String,
        /// Whether a missing wheel is the only cause.
        #[serde(default)]
        no_wheel: bool,
        /// Whether the cause is a full disk in the sandbox.
        #[serde(default)]
        no_room: bool,
    },
    Done(T),
}

impl Resolved {
    /// Normalises names, or returns what is wrong.
    pub(super) fn checked(mut self) -> Result<Resolved, &'static str> {
        let is_tag = |letter: char| letter.is_ascii_alphanumeric() || "/._-+ ".contains(letter);
        if self.tag.is_empty() || self.tag.len() > 500 || !self.tag.chars().all(is_tag) {
            return Err("the platform has no proper name");
        }
        if self.pins.len() > MAX_PACKAGES {
            return Err("the number of packages is absurd");
        }
        for pin in &mut self.pins {
            pin.check()?;
        }
        self.held_back.truncate(MAX_REMARKS);
        for held in &mut self.held_back {
            held.replaced.truncate(MAX_REMARKS);
            let is_package = |name: &str, versions: [&str; 2]| {
                is_name(name) && name.len() <= 200 && versions.into_iter().all(is_version)
            };
            let all_are = held
                .replaced
                .iter()
                .all(|one| is_package(&one.name, [&one.version, &one.wanted]));
            if !is_package(&held.name, [&held.version, &held.newer]) || !all_are {
                return Err("a remark is about no proper package");
            }
        }
        Ok(self)
    }
}

impl Pin {
    fn check(&mut self) -> Result<(), &'static str> {
        if !is_name(&self.name) || self.name.len() > 200 {
            return Err("a package has no proper name");
        }
        self.name = normalised(&self.name);
        let is_hash = |hash: &str| {
            let digits = hash.strip_prefix("sha256:").unwrap_or_default();
            digits.len() == 64 && digits.chars().all(|digit| digit.is_ascii_hexdigit())
        };
        if self.hashes.is_empty() || !self.hashes.iter().all(|hash| is_hash(hash)) {
            return Err("a package has no proper hash");
        }
        self.hashes.sort();
        match (&self.version, &self.url) {
            (Some(version), None) if is_version(version) => Ok(()),
            (None, Some(url)) if is_plain_address(url) => Ok(()),
            _ => Err("a package has no proper version"),
        }
    }
}

/// Returns whether a URL is a single word. It is written back inside as a line of a requirements
/// file.
fn is_plain_address(url: &str) -> bool {
    url.starts_with("https://")
        && url.len() <= 2_000
        && url
            .chars()
            .all(|letter| ('!'..='~').contains(&letter) && !"\\$".contains(letter))
}

/// Checks the list of packed packages and normalises names.
pub(super) fn checked_packages(mut packed: Vec<Packed>) -> Result<Vec<Packed>, &'static str> {
    if packed.len() > MAX_PACKAGES {
        return Err("the number of packages is absurd");
    }
    for package in &mut packed {
        if !is_name(&package.name) || !is_version(&package.version) {
            return Err("a package has no proper name or version");
        }
        package.name = normalised(&package.name);
    }
    Ok(packed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pin(name: &str, version: Option<&str>, url: Option<&str>, hash: &str) -> Pin {
        let owned = |text: &str| text.to_owned();
        Pin {
            name: owned(name),
            version: version.map(owned),
            url: url.map(owned),
            hashes: vec![owned(hash)],
        }
    }

    #[test]
    fn an_answer_has_names_versions_and_hashes_or_is_refused() {
        let hash = format!("sha256:{}", "0".repeat(64));
        let resolved = |tag: &str, pins| Resolved {
            tag: tag.to_owned(),
            pins,
            held_back: Vec::new(),
        };
        let check = |pin: Pin| resolved("cpython-311", vec![pin]).checked();
        assert_eq!(
            check(pin("A_b", Some("1.0"), None, &hash)).unwrap().pins[0].name,
            "a-b"
        ); // control
        check(pin("a", None, Some("https://example.com/a.whl"), &hash)).unwrap(); // control
        for bad in [
            pin("-r", Some("1.0"), None, &hash),
            pin("a", Some("1.0 --x"), None, &hash),
            pin("a", Some("1.0\n"), None, &hash),
            pin("a", None, None, &hash),
            pin("a", Some("1.0"), Some("https://example.com/a.whl"), &hash),
            pin("a", None, Some("https://example.com/a.whl --x"), &hash),
            pin("a", None, Some("file:///a.whl"), &hash),
            pin("a", Some("1.0"), None, "sha256:00"),
            pin("a", Some("1.0"), None, &"0".repeat(64)),
        ] {
            check(bad.clone()).expect_err(&format!("{bad:?}"));
        }
        let pins = vec![pin("a", Some("1"), None, &hash); MAX_PACKAGES + 1];
        resolved("x", pins).checked().unwrap_err();
        resolved("x\n", Vec::new()).checked().unwrap_err();
    }

    #[test]
    fn a_request_is_flat_json() {
        let wanted = WantedPackages {
            requirements: vec!["a>1"],
            present: [("b", "1")].into(),
            named: vec!["a"],
            upgrade: false,
        };
        let request = InstallerRequest {
            step: InstallerStep::Resolve(wanted),
            uv: "/uv",
            variables: &BTreeMap::new(),
            certificates: None,
        };
        let expected = serde_json::json!({
            "step": "resolve", "requirements": ["a>1"], "present": {"b": "1"}, "named": ["a"],
            "upgrade": false, "uv": "/uv", "variables": {}, "certificates": null,
        });
        assert_eq!(serde_json::to_value(&request).unwrap(), expected);
    }

    #[test]
    fn a_failure_is_told_from_an_answer() {
        let read = |text: &str| serde_json::from_str::<InstallerReply<Resolved>>(text).unwrap();
        let failed = |text: &str| match read(text) {
            InstallerReply::Failed {
                failed,
                no_wheel,
                no_room,
            } => (failed, no_wheel, no_room),
            InstallerReply::Done(done) => panic!("{done:?}"),
        };
        assert_eq!(
            failed(r#"{"failed": "no", "no_wheel": true}"#),
            ("no".to_owned(), true, false)
        );
        assert_eq!(
            failed(r#"{"failed": "no", "no_room": true}"#),
            ("no".to_owned(), false, true)
        );
        assert!(matches!(
            read(r#"{"tag": "x", "pins": []}"#),
            InstallerReply::Done(_)
        ));
    }
}
