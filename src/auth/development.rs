//! Development mode: a key pair and a token of our own, in three files.
//!
//! ```text
//!  dev_private_key.pem   0600   RSA 2048; signs the token
//!  dev_public_key.pem    0644   checks it
//!  dev_token.txt         0600   one token for one hour; renewed at startup if it is no longer
//!                               valid
//! ```
//!
//! It is for a server and a client of one person on one machine: any process that can read the
//! private key can impersonate every caller. So files that others could have read or changed are
//! rejected, and `Authenticator::may_listen` allows loopback addresses only. Development mode is
//! off once an operator has configured an issuer or an API key.

use std::fs::{DirBuilder, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ring::rand::SystemRandom;
use ring::signature::{RSA_PKCS1_SHA256, RsaKeyPair};
use rsa::RsaPrivateKey;
use rsa::pkcs8::{DecodePrivateKey, EncodePrivateKey, EncodePublicKey, LineEnding};
use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use serde_json::json;
use zeroize::Zeroizing;

use super::caller::Scope;
use super::claims::{self, Expected};
use super::keys::{Algorithm, PublicKey, PublicKeyProblem};
use super::token::Token;

const PRIVATE_KEY: &str = "dev_private_key.pem";
const PUBLIC_KEY: &str = "dev_public_key.pem";
/// The name of the file with the token.
pub(super) const TOKEN: &str = "dev_token.txt";

/// The subject of the token.
const SUBJECT: &str = "developer";

const RSA_BITS: usize = 2048;
const LIFETIME: Duration = Duration::from_secs(3600);

/// A token with less time left is renewed, so that a token is not useless shortly after it was
/// printed.
const MIN_REMAINING: Duration = Duration::from_secs(60);

/// Keys and tokens are smaller.
const MAX_FILE_BYTES: u64 = 64 << 10;

/// Why development mode cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DevelopmentError {
    #[error("could not use {}", path.display())]
    File {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },
    #[error("other users may read or change {}, so that they could be anybody; remove it, and it \
             is made anew", path.display())]
    OpenToOthers { path: PathBuf },
    #[error("{} does not hold an RSA key of at least 2048 bits; remove it, and it is made \
             anew", path.display())]
    NotAKey { path: PathBuf },
    #[error("{} does not belong to the private key beside it; remove it, and it is made \
             anew", path.display())]
    OtherKey { path: PathBuf },
    #[error("could not make an RSA key")]
    NoKey,
}

/// The claims of development tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct DevelopmentClaims<'a> {
    pub issuer: &'a str,
    pub audiences: &'a [String],
}

/// Ensures that all three files are present and valid, and returns the key that checks tokens.
pub(super) fn prepare(
    folder: &Path,
    wording: &DevelopmentClaims<'_>,
    now: SystemTime,
) -> Result<PublicKey, DevelopmentError> {
    let folder = Folder::open(folder)?;
    let private = match folder.read_private(PRIVATE_KEY)? {
        Some(text) => {
            RsaPrivateKey::from_pkcs8_pem(&text).map_err(|_| folder.not_a_key(PRIVATE_KEY))?
        }
        None => folder.make_private_key()?,
    };
    let public = private
        .to_public_key()
        .to_public_key_pem(LineEnding::LF)
        .map_err(|_| DevelopmentError::NoKey)?;
    let key = PublicKey::from_pem(&public)
        .map_err(|_: PublicKeyProblem| folder.not_a_key(PRIVATE_KEY))?;
    match folder.read(PUBLIC_KEY)? {
        None => folder.write(PUBLIC_KEY, public.as_bytes(), 0o644)?,
        Some((_, text)) if PublicKey::from_pem(&text) == Ok(key.clone()) => {}
        Some(_) => {
            return Err(DevelopmentError::OtherKey {
                path: folder.path.join(PUBLIC_KEY),
            });
        }
    }
    let is_good = folder
        .read_private(TOKEN)?
        .is_some_and(|token| is_good(&token, &key, wording, now));
    if !is_good {
        let token = token(&private, wording, now)?;
        folder.write(TOKEN, token.as_bytes(), 0o600)?;
    }
    Ok(key)
}

/// Returns whether a token of an earlier start is still usable.
fn is_good(token: &str, key: &PublicKey, wording: &DevelopmentClaims<'_>, now: SystemTime) -> bool {
    let expected = Expected {
        issuer: wording.issuer,
        audiences: wording.audiences,
        principal: None,
    };
    Token::parse(token.trim()).is_ok_and(|token| {
        key.verify(token.algorithm, token.message, &token.signature)
            && claims::judge(&token.claims, expected, now)
                .is_ok_and(|caller| caller.expires.is_some_and(|end| end > now + MIN_REMAINING))
    })
}

fn token(
    private: &RsaPrivateKey,
    wording: &DevelopmentClaims<'_>,
    now: SystemTime,
) -> Result<Zeroizing<String>, DevelopmentError> {
    let seconds = now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let scopes: Vec<&str> = Scope::ALL.into_iter().map(Scope::name).collect();
    let audience = match wording.audiences {
        [only] => json!(only),
        several => json!(several),
    };
    let claims = json!({
        "iss": wording.issuer, "sub": SUBJECT, "aud": audience, "scope": scopes.join(" "),
        "iat": seconds, "exp": seconds + LIFETIME.as_secs(),
    });
    let header = json!({"alg": Algorithm::Rs256.name(), "typ": "JWT"});
    let encode = |value: &serde_json::Value| URL_SAFE_NO_PAD.encode(value.to_string());
    let message = format!("{}.{}", encode(&header), encode(&claims));
    let key = private
        .to_pkcs8_der()
        .map_err(|_| DevelopmentError::NoKey)?;
    let key = RsaKeyPair::from_pkcs8(key.as_bytes()).map_err(|_| DevelopmentError::NoKey)?;
    let mut signature = vec![0; key.public().modulus_len()];
    key.sign(
        &RSA_PKCS1_SHA256,
        &SystemRandom::new(),
        message.as_bytes(),
        &mut signature,
    )
    .map_err(|_| DevelopmentError::NoKey)?;
    Ok(Zeroizing::new(format!(
        "{message}.{}",
        URL_SAFE_NO_PAD.encode(signature)
    )))
}

/// The folder of the files. While it is open, no other server creates files there.
struct Folder {
    handle: File,
    path: PathBuf,
}

impl Folder {
    fn open(path: &Path) -> Result<Folder, DevelopmentError> {
        let failed = |cause| DevelopmentError::File {
            path: path.to_owned(),
            cause,
        };
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(path)
            .map_err(failed)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let handle =
            rustix::fs::open(path, flags, Mode::empty()).map_err(|error| failed(error.into()))?;
        let folder = Folder {
            handle: File::from(handle),
            path: path.to_owned(),
        };
        let found = folder.handle.metadata().map_err(failed)?;
        // A user who can write to the folder can replace our files.
        if found.uid() != our_id() || found.mode() & 0o022 != 0 {
            return Err(DevelopmentError::OpenToOthers {
                path: path.to_owned(),
            });
        }
        rustix::fs::flock(&folder.handle, FlockOperation::LockExclusive)
            .map_err(|error| failed(error.into()))?;
        Ok(folder)
    }

    fn make_private_key(&self) -> Result<RsaPrivateKey, DevelopmentError> {
        let key = RsaPrivateKey::new(&mut rsa::rand_core::OsRng, RSA_BITS)
            .map_err(|_| DevelopmentError::NoKey)?;
        let text = key
            .to_pkcs8_pem(LineEnding::LF)
            .map_err(|_| DevelopmentError::NoKey)?;
        self.write(PRIVATE_KEY, text.as_bytes(), 0o600)?;
        Ok(key)
    }

    /// Reads a file that must not be accessible to others.
    fn read_private(&self, name: &str) -> Result<Option<Zeroizing<String>>, DevelopmentError> {
        match self.read(name)? {
            Some((mode, _)) if mode & 0o077 != 0 => Err(DevelopmentError::OpenToOthers {
                path: self.path.join(name),
            }),
            found => Ok(found.map(|(_, text)| text)),
        }
    }

    /// Reads a file of ours, if it exists, with its mode.
    fn read(&self, name: &str) -> Result<Option<(u32, Zeroizing<String>)>, DevelopmentError> {
        let failed = |cause| DevelopmentError::File {
            path: self.path.join(name),
            cause,
        };
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = match rustix::fs::openat(&self.handle, name, flags, Mode::empty()) {
            Ok(file) => File::from(file),
            Err(Errno::NOENT) => return Ok(None),
            Err(error) => return Err(failed(error.into())),
        };
        let found = file.metadata().map_err(failed)?;
        if !found.is_file() {
            return Err(failed(io::Error::other("it is not a regular file")));
        }
        if found.uid() != our_id() || found.mode() & 0o022 != 0 {
            return Err(DevelopmentError::OpenToOthers {
                path: self.path.join(name),
            });
        }
        let mut text = Zeroizing::new(String::new());
        file.take(MAX_FILE_BYTES)
            .read_to_string(&mut text)
            .map_err(failed)?;
        Ok(Some((found.mode(), text)))
    }

    /// Writes a file atomically, never with more permissions than intended.
    fn write(&self, name: &str, bytes: &[u8], mode: u32) -> Result<(), DevelopmentError> {
        let failed = |cause: io::Error| DevelopmentError::File {
            path: self.path.join(name),
            cause,
        };
        let unfinished = format!(".{name}.new");
        match rustix::fs::unlinkat(&self.handle, &unfinished, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(error) => return Err(failed(error.into())),
        }
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&self.handle, &unfinished, flags, Mode::from_raw_mode(mode));
        let mut file = File::from(file.map_err(|error| failed(error.into()))?);
        file.write_all(bytes)
            .and_then(|()| file.sync_all())
            .map_err(failed)?;
        rustix::fs::renameat(&self.handle, &unfinished, &self.handle, name)
            .map_err(|error| failed(error.into()))
    }

    fn not_a_key(&self, name: &str) -> DevelopmentError {
        DevelopmentError::NotAKey {
            path: self.path.join(name),
        }
    }
}

fn our_id() -> u32 {
    rustix::process::geteuid().as_raw()
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;

    use super::super::tests::{RSA, bearer};
    use super::super::{
        AuthChoice, AuthSettings, Authenticator, Caller, Denied, IssuerVariables, Scopes,
    };
    use super::*;

    struct Place(tempfile::TempDir);

    impl Place {
        fn new() -> Place {
            Place(tempfile::tempdir().unwrap())
        }

        fn folder(&self) -> PathBuf {
            self.0.path().join("auth")
        }

        fn file(&self, name: &str) -> PathBuf {
            self.folder().join(name)
        }

        fn text(&self, name: &str) -> String {
            fs::read_to_string(self.file(name)).unwrap()
        }

        fn mode(&self, name: &str) -> u32 {
            fs::metadata(self.file(name)).unwrap().mode() & 0o777
        }

        /// A folder with a key in place, since generating one takes a while.
        fn with_key() -> Place {
            let place = Place::new();
            DirBuilder::new()
                .mode(0o700)
                .create(place.folder())
                .unwrap();
            fs::write(
                place.file(PRIVATE_KEY),
                RSA.to_pkcs8_pem(LineEnding::LF).unwrap().as_bytes(),
            )
            .unwrap();
            place.chmod(PRIVATE_KEY, 0o600);
            place
        }

        fn chmod(&self, name: &str, mode: u32) {
            fs::set_permissions(self.file(name), Permissions::from_mode(mode)).unwrap();
        }

        fn prepare_at(&self, now: SystemTime) -> Result<PublicKey, DevelopmentError> {
            let audiences = ["us".to_owned()];
            prepare(
                &self.folder(),
                &DevelopmentClaims {
                    issuer: "me",
                    audiences: &audiences,
                },
                now,
            )
        }

        fn prepare(&self) -> Result<PublicKey, DevelopmentError> {
            self.prepare_at(SystemTime::now())
        }

        fn settings(&self) -> AuthSettings {
            AuthSettings {
                development_dir: self.folder(),
                ..AuthSettings::default()
            }
        }
    }

    #[tokio::test]
    async fn the_files_are_made_once_and_the_token_can_be_used() {
        let place = Place::new();
        let authenticator = Authenticator::from_settings(&place.settings())
            .await
            .unwrap();
        assert_eq!(
            authenticator.development_token(),
            Some(place.file(TOKEN).as_path())
        );
        assert_eq!(
            [PRIVATE_KEY, PUBLIC_KEY, TOKEN].map(|name| place.mode(name) & 0o077 == 0),
            [true, false, true]
        );
        assert_eq!(fs::metadata(place.folder()).unwrap().mode() & 0o777, 0o700);
        assert!(
            place
                .text(PRIVATE_KEY)
                .starts_with("-----BEGIN PRIVATE KEY-----")
        );
        assert!(
            place
                .text(PUBLIC_KEY)
                .starts_with("-----BEGIN PUBLIC KEY-----")
        );
        assert_eq!(
            fs::read_dir(place.folder()).unwrap().count(),
            3,
            "nothing unfinished is left"
        );
        let Caller {
            principal,
            scopes,
            expires,
        } = authenticator
            .authenticate(&bearer(&place.text(TOKEN)))
            .await
            .unwrap();
        assert_eq!(
            (principal.as_str(), scopes),
            ("cellblock-development sub:developer", Scopes::everything())
        );
        let rest = expires.unwrap().duration_since(SystemTime::now()).unwrap();
        assert!(
            rest > LIFETIME - Duration::from_secs(60) && rest <= LIFETIME + Duration::from_secs(5),
            "{rest:?}"
        );

        let before = [PRIVATE_KEY, PUBLIC_KEY, TOKEN].map(|name| place.text(name));
        let again = Authenticator::from_settings(&place.settings())
            .await
            .unwrap();
        assert_eq!(
            [PRIVATE_KEY, PUBLIC_KEY, TOKEN].map(|name| place.text(name)),
            before
        );
        assert!(again.authenticate(&bearer(&before[2])).await.is_ok());
    }

    #[test]
    fn a_token_that_is_no_longer_good_is_made_anew_with_the_same_key() {
        let place = Place::with_key();
        let start = SystemTime::now();
        let key = place.prepare_at(start).unwrap();
        let (private, token) = (place.text(PRIVATE_KEY), place.text(TOKEN));
        assert_eq!(place.prepare_at(start + LIFETIME / 2).unwrap(), key);
        assert_eq!(place.text(TOKEN), token, "it was still good"); // control
        assert_eq!(place.prepare_at(start + LIFETIME).unwrap(), key);
        assert_ne!(place.text(TOKEN), token);
        assert_eq!(place.text(PRIVATE_KEY), private);
        assert_eq!(place.mode(TOKEN), 0o600);
        fs::write(place.file(TOKEN), "nonsense").unwrap();
        place.prepare().unwrap();
        assert!(Token::parse(&place.text(TOKEN)).is_ok());
    }

    #[test]
    fn a_token_for_another_audience_is_made_anew() {
        let place = Place::with_key();
        place.prepare().unwrap();
        let token = place.text(TOKEN);
        let audiences = ["them".to_owned()];
        prepare(
            &place.folder(),
            &DevelopmentClaims {
                issuer: "me",
                audiences: &audiences,
            },
            SystemTime::now(),
        )
        .unwrap();
        assert_ne!(place.text(TOKEN), token);
    }

    #[test]
    fn files_that_others_could_read_or_change_are_refused() {
        for (name, mode) in [
            (PRIVATE_KEY, 0o640),
            (PRIVATE_KEY, 0o604),
            (TOKEN, 0o644),
            (PUBLIC_KEY, 0o666),
            (TOKEN, 0o602),
        ] {
            let place = Place::with_key();
            place.prepare().unwrap(); // control
            place.chmod(name, mode);
            let error = place.prepare().unwrap_err();
            assert!(
                matches!(error, DevelopmentError::OpenToOthers { .. }),
                "{name} {mode:o}: {error}"
            );
        }
        let place = Place::with_key();
        fs::set_permissions(place.folder(), Permissions::from_mode(0o777)).unwrap();
        assert!(matches!(
            place.prepare(),
            Err(DevelopmentError::OpenToOthers { .. })
        ));
    }

    #[test]
    fn a_link_is_not_followed() {
        let place = Place::with_key();
        place.prepare().unwrap(); // control
        let elsewhere = place.0.path().join("elsewhere");
        fs::rename(place.file(PRIVATE_KEY), &elsewhere).unwrap();
        std::os::unix::fs::symlink(&elsewhere, place.file(PRIVATE_KEY)).unwrap();
        assert!(matches!(
            place.prepare(),
            Err(DevelopmentError::File { .. })
        ));
    }

    #[test]
    fn files_that_do_not_belong_together_are_refused() {
        let place = Place::with_key();
        place.prepare().unwrap(); // control
        let other = RsaPrivateKey::new(&mut rsa::rand_core::OsRng, RSA_BITS)
            .unwrap()
            .to_public_key();
        fs::write(
            place.file(PUBLIC_KEY),
            other.to_public_key_pem(LineEnding::LF).unwrap(),
        )
        .unwrap();
        assert!(matches!(
            place.prepare(),
            Err(DevelopmentError::OtherKey { .. })
        ));
        fs::write(place.file(PRIVATE_KEY), "nonsense").unwrap();
        assert!(matches!(
            place.prepare(),
            Err(DevelopmentError::NotAKey { .. })
        ));
        let weak = RsaPrivateKey::new(&mut rsa::rand_core::OsRng, 1024).unwrap();
        fs::write(
            place.file(PRIVATE_KEY),
            weak.to_pkcs8_pem(LineEnding::LF).unwrap().as_bytes(),
        )
        .unwrap();
        assert!(matches!(
            place.prepare(),
            Err(DevelopmentError::NotAKey { .. })
        ));
    }

    #[test]
    fn two_servers_that_start_at_once_agree_on_one_key() {
        let place = Place::new();
        let keys: Vec<PublicKey> = std::thread::scope(|scope| {
            let starts: Vec<_> = (0..2)
                .map(|_| scope.spawn(|| place.prepare().unwrap()))
                .collect();
            starts
                .into_iter()
                .map(|start| start.join().unwrap())
                .collect()
        });
        assert_eq!(keys[0], keys[1]);
        assert_eq!(place.prepare().unwrap(), keys[0]);
    }

    #[tokio::test]
    async fn with_a_key_of_the_operator_there_is_no_development() {
        let place = Place::with_key();
        place.prepare().unwrap();
        let token = place.text(TOKEN);
        let key = place.0.path().join("public.pem");
        let other = RsaPrivateKey::new(&mut rsa::rand_core::OsRng, RSA_BITS)
            .unwrap()
            .to_public_key();
        fs::write(&key, other.to_public_key_pem(LineEnding::LF).unwrap()).unwrap();
        let variables = IssuerVariables {
            issuer: Some("me".to_owned()),
            audience: Some("us".to_owned()),
            public_key_path: Some(key),
            ..IssuerVariables::default()
        };
        let unmade = place.0.path().join("unmade");
        let settings = AuthSettings {
            variables,
            development_dir: unmade.clone(),
            ..AuthSettings::default()
        };
        let authenticator = Authenticator::from_settings(&settings).await.unwrap();
        assert_eq!(
            authenticator.authenticate(&bearer(&token)).await,
            Err(Denied::BadToken)
        );
        assert_eq!(authenticator.development_token(), None);
        assert!(!unmade.exists());
        let off = AuthSettings {
            choice: AuthChoice::Off,
            development_dir: unmade.clone(),
            ..AuthSettings::default()
        };
        Authenticator::from_settings(&off).await.unwrap();
        assert!(!unmade.exists());
    }
}
