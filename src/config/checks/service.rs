//! Settings of `cellblock serve`: its listen address, its names, and how long callers wait.

use std::net::SocketAddr;

use super::super::table::Key;
use super::super::{ConfigError, ServiceSettings, TlsFiles};
use super::{Check, has_default, invalid};
use crate::http::{AllowedHost, Origin};

const LISTEN_ALLOWED: &str = "an address and a port such as 127.0.0.1:8000 or [::]:8443, or a port \
                              alone for this machine only";
const URL_ALLOWED: &str = "the scheme, host and port by which clients know this server, such as \
                           https://cells.example.com, without a path";

impl Check<'_> {
    pub(super) fn service(&self) -> Result<ServiceSettings, ConfigError> {
        let listen = self.read(Key::Listen, LISTEN_ALLOWED, listen_address)?;
        let public_url = self.read(Key::PublicUrl, URL_ALLOWED, |text| {
            let url = text.strip_suffix('/').unwrap_or(text);
            url.parse::<Origin>()
                .map(|_| url.to_owned())
                .map_err(|_| None)
        })?;
        let mut allowed_hosts: Vec<AllowedHost> = self.each(Key::AllowedHosts)?;
        // Clients use this name, so it is the `Host` of their requests.
        let own_host = public_url
            .as_ref()
            .and_then(|url| url.split("://").nth(1))
            .and_then(|host| host.parse().ok());
        allowed_hosts.extend(own_host);
        Ok(ServiceSettings {
            listen: has_default(listen),
            public_url,
            allowed_hosts,
            allowed_origins: self.each(Key::AllowedOrigins)?,
            tls: self.tls()?,
            max_connections: self.number(Key::MaxConnections)?,
            max_wait: self.duration(Key::MaxWait)?,
        })
    }

    fn tls(&self) -> Result<Option<TlsFiles>, ConfigError> {
        match (self.path(Key::TlsCert)?, self.path(Key::TlsKey)?) {
            (None, None) => Ok(None),
            (Some(certificates), Some(key)) => Ok(Some(TlsFiles { certificates, key })),
            (Some(_), None) => Err(self.invalid(
                Key::TlsCert,
                "a file of certificates, together with tls_key",
            )),
            (None, Some(_)) => {
                Err(self.invalid(Key::TlsKey, "the key of the certificates in tls_cert"))
            }
        }
    }

    /// Reads a list of values of one kind.
    fn each<T>(&self, key: Key) -> Result<Vec<T>, ConfigError>
    where
        T: std::str::FromStr,
        T::Err: std::fmt::Display,
    {
        let Some((origin, texts)) = self.written.texts(key)? else {
            return Ok(Vec::new());
        };
        let read = |text: &&str| {
            text.parse::<T>()
                .map_err(|error| invalid(key.name(), origin, text, &error.to_string(), None))
        };
        texts.iter().map(read).collect()
    }
}

fn listen_address(text: &str) -> Result<SocketAddr, Option<String>> {
    let text = text.trim();
    if let Ok(port) = text.parse::<u16>() {
        return Ok(SocketAddr::from(([127, 0, 0, 1], port)));
    }
    let text = text
        .strip_prefix("localhost:")
        .map_or(text.to_owned(), |port| format!("127.0.0.1:{port}"));
    text.parse().map_err(|_| None)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::tests::case;
    use super::*;

    #[test]
    fn by_default_only_this_machine_is_served() {
        let service = case().settings().service;
        assert_eq!(service.listen, "127.0.0.1:8000".parse().unwrap());
        assert_eq!((service.public_url, service.tls), (None, None));
        assert_eq!(
            (service.max_connections, service.max_wait),
            (4096, Duration::from_secs(50))
        );
    }

    #[test]
    fn an_address_can_be_written_short() {
        for (written, meant) in [
            ("9000", "127.0.0.1:9000"),
            ("localhost:9000", "127.0.0.1:9000"),
            ("0.0.0.0:80", "0.0.0.0:80"),
            ("[::1]:8000", "[::1]:8000"),
        ] {
            assert_eq!(
                case().flag(Key::Listen, written).settings().service.listen,
                meant.parse().unwrap(),
                "{written}"
            );
        }
        for bad in ["", "example.com:80", "127.0.0.1", "::1:8000", "70000"] {
            assert!(
                case()
                    .flag(Key::Listen, bad)
                    .refusal()
                    .contains("listen cannot be"),
                "{bad}"
            );
        }
    }

    #[test]
    fn the_public_address_is_a_name_of_the_server() {
        let service = case()
            .flag(Key::PublicUrl, "https://cells.example.com/")
            .settings()
            .service;
        assert_eq!(
            service.public_url.as_deref(),
            Some("https://cells.example.com")
        );
        assert_eq!(
            service.allowed_hosts,
            ["cells.example.com".parse().unwrap()]
        );
        for bad in [
            "cells.example.com",
            "https://cells.example.com/mcp",
            "ftp://a.test",
            "https://u:p@a.test",
        ] {
            assert!(
                case()
                    .flag(Key::PublicUrl, bad)
                    .refusal()
                    .contains("public_url cannot be"),
                "{bad}"
            );
        }
    }

    #[test]
    fn hosts_and_origins_are_checked_one_by_one() {
        let yaml = "allowed_hosts: [a.test, 'b.test:8443']\nallowed_origins: ['https://app.test']";
        let service = case().yaml(yaml).settings().service;
        assert_eq!(
            (service.allowed_hosts.len(), service.allowed_origins.len()),
            (2, 1)
        );
        assert!(
            case()
                .yaml("allowed_hosts: [a.test, '*']")
                .refusal()
                .contains("allowed_hosts cannot be \"*\"")
        );
        assert!(
            case()
                .yaml("allowed_origins: ['*']")
                .refusal()
                .contains("allowed_origins cannot be \"*\"")
        );
    }

    #[test]
    fn tls_needs_both_files() {
        let both = case()
            .yaml("tls_cert: c.pem\ntls_key: k.pem")
            .settings()
            .service
            .tls
            .unwrap();
        assert_eq!(both.key, std::path::Path::new("/etc/cellblock/k.pem"));
        assert!(
            case()
                .yaml("tls_cert: c.pem")
                .refusal()
                .contains("together with tls_key")
        );
        assert!(case().yaml("tls_key: k.pem").refusal().contains("tls_cert"));
    }
}
