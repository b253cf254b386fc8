//! Checks the `Host` and `Origin` of requests.
//!
//! A page in a browser can make the browser send requests to any address, including this machine's
//! own. It cannot choose the `Host` and `Origin` headers that the browser writes. So both are
//! compared with lists, on every route, before anything else is checked.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

use axum::http::uri::{Authority, Uri};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};

/// The names of this server, and the origins of pages that may use it.
#[derive(Debug, Clone, Default)]
pub struct Allowed {
    hosts: Vec<AllowedHost>,
    origins: Vec<Origin>,
    /// The port that this server listens on.
    port: u16,
}

/// A name of this server; with a port, only at that port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AllowedHost {
    host: String,
    port: Option<u16>,
}

/// A page's origin: scheme, host and port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Origin {
    scheme: String,
    host: String,
    port: u16,
}

/// Why a request was rejected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("the request must name its host exactly once")]
    NoHost,
    #[error(
        "this server does not go by the name in the Host header; its operator can add it with \
         --allowed-host"
    )]
    ForeignHost,
    #[error(
        "pages of this origin may not use this server; its operator can allow them with \
         --allowed-origin"
    )]
    ForeignOrigin,
}

impl Refusal {
    pub fn status(self) -> StatusCode {
        match self {
            Refusal::NoHost => StatusCode::BAD_REQUEST,
            Refusal::ForeignHost | Refusal::ForeignOrigin => StatusCode::FORBIDDEN,
        }
    }
}

impl Allowed {
    /// Creates the lists of a server that listens at `address`: the operator's list, the address
    /// itself, and the loopback names, which no foreign page can have.
    pub fn new(address: SocketAddr, hosts: Vec<AllowedHost>, origins: Vec<Origin>) -> Allowed {
        let mut all = hosts;
        if !address.ip().is_unspecified() {
            all.push(AllowedHost {
                host: address.ip().to_string(),
                port: Some(address.port()),
            });
        }
        for host in ["localhost", "127.0.0.1", "::1"] {
            // Any port: a tunnel may forward requests from another one.
            all.push(AllowedHost {
                host: host.to_owned(),
                port: None,
            });
        }
        Allowed {
            hosts: all,
            origins,
            port: address.port(),
        }
    }

    /// Checks a request by its head.
    pub fn check(&self, uri: &Uri, headers: &HeaderMap) -> Result<(), Refusal> {
        let host = host_of(uri, headers).ok_or(Refusal::NoHost)?;
        let (name, port) = (plain(host.host()), host.port_u16());
        let is_ours = |allowed: &AllowedHost| {
            allowed.host == name
                && allowed
                    .port
                    .is_none_or(|allowed| port.is_none_or(|port| port == allowed))
        };
        if !self.hosts.iter().any(is_ours) {
            return Err(Refusal::ForeignHost);
        }
        let mut origins = headers.get_all(header::ORIGIN).iter();
        match (origins.next(), origins.next()) {
            (None, _) => Ok(()),
            (Some(origin), None) => self.check_origin(origin, &name, port),
            (Some(_), Some(_)) => Err(Refusal::ForeignOrigin),
        }
    }

    /// Returns the origin of a request if the operator has listed it, for the CORS headers of the
    /// response.
    pub fn listed_origin<'a>(&self, headers: &'a HeaderMap) -> Option<&'a HeaderValue> {
        let written = headers.get(header::ORIGIN)?;
        let origin = written.to_str().ok()?.parse::<Origin>().ok()?;
        self.origins.contains(&origin).then_some(written)
    }

    /// Returns whether an origin has a port of this server, for a request without a port. A browser
    /// omits only the default port of a scheme. So the page is at that port, perhaps of a proxy, or
    /// at the port where this server listens.
    fn is_own_port(&self, origin: &Origin) -> bool {
        origin.port == usual_port(&origin.scheme) || origin.port == self.port
    }

    fn check_origin(
        &self,
        origin: &HeaderValue,
        host: &str,
        port: Option<u16>,
    ) -> Result<(), Refusal> {
        let parsed = origin
            .to_str()
            .ok()
            .and_then(|text| text.parse::<Origin>().ok());
        let origin = parsed.ok_or(Refusal::ForeignOrigin)?;
        // A page of this server: its origin is exactly the name that was accepted above.
        let is_own = origin.host == host
            && port.map_or_else(|| self.is_own_port(&origin), |port| port == origin.port);
        if is_own || self.origins.contains(&origin) {
            Ok(())
        } else {
            Err(Refusal::ForeignOrigin)
        }
    }
}

fn usual_port(scheme: &str) -> u16 {
    if scheme == "https" { 443 } else { 80 }
}

/// Returns the single host that a request is for. HTTP/2 has it in the URI, HTTP/1 in a header; if
/// both are present, they must agree.
fn host_of(uri: &Uri, headers: &HeaderMap) -> Option<Authority> {
    let mut written = headers.get_all(header::HOST).iter();
    let header = match (written.next(), written.next()) {
        (Some(host), None) => Some(Authority::try_from(host.as_bytes()).ok()?),
        (None, _) => None,
        (Some(_), Some(_)) => return None,
    };
    let host = match (uri.authority(), header) {
        (Some(address), Some(header)) if *address != header => return None,
        (Some(address), _) => address.clone(),
        (None, header) => header?,
    };
    if has_odd_port(&host) {
        return None;
    }
    // User information is not allowed here.
    (!host.as_str().contains('@')).then_some(host)
}

/// Normalizes a host: without brackets and the dot of the root, in lower case.
fn plain(host: &str) -> String {
    let host = host
        .strip_prefix('[')
        .and_then(|host| host.strip_suffix(']'))
        .unwrap_or(host);
    let host = host.strip_suffix('.').unwrap_or(host).to_ascii_lowercase();
    // Addresses have many spellings.
    host.parse::<IpAddr>()
        .map_or(host, |address| address.to_string())
}

/// Returns whether the host is followed by something that is not a port.
fn has_odd_port(authority: &Authority) -> bool {
    authority.port_u16().is_none() && !authority.as_str().ends_with(authority.host())
}

/// A text that is not a valid host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "a name or an address, with a port if it holds only there, such as `cells.example.com` or \
     `10.0.0.7:8000`"
)]
pub struct BadHost;

impl FromStr for AllowedHost {
    type Err = BadHost;

    fn from_str(text: &str) -> Result<AllowedHost, BadHost> {
        if let Ok(address) = text.parse::<IpAddr>() {
            return Ok(AllowedHost {
                host: address.to_string(),
                port: None,
            });
        }
        let authority = text.parse::<Authority>().map_err(|_| BadHost)?;
        if authority.as_str().contains(['@', '*'])
            || authority.host().is_empty()
            || has_odd_port(&authority)
        {
            return Err(BadHost);
        }
        Ok(AllowedHost {
            host: plain(authority.host()),
            port: authority.port_u16(),
        })
    }
}

/// A text that is not a valid origin.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a scheme, a host and perhaps a port, such as `https://app.example.com`")]
pub struct BadOrigin;

impl FromStr for Origin {
    type Err = BadOrigin;

    fn from_str(text: &str) -> Result<Origin, BadOrigin> {
        let uri = text.parse::<Uri>().map_err(|_| BadOrigin)?;
        let scheme = uri.scheme_str().ok_or(BadOrigin)?.to_ascii_lowercase();
        if !matches!(scheme.as_str(), "http" | "https") {
            return Err(BadOrigin);
        }
        let usual = usual_port(&scheme);
        let authority = uri.authority().ok_or(BadOrigin)?;
        let has_more = !matches!(uri.path(), "" | "/")
            || uri.query().is_some()
            || authority.as_str().contains(['@', '*']);
        if has_more || has_odd_port(authority) {
            return Err(BadOrigin);
        }
        Ok(Origin {
            scheme,
            host: plain(authority.host()),
            port: authority.port_u16().unwrap_or(usual),
        })
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}://{}:{}", self.scheme, self.host, self.port)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allowed() -> Allowed {
        Allowed::new(
            "10.0.0.7:8000".parse().unwrap(),
            vec![
                "cells.example.com".parse().unwrap(),
                "proxied.example.com:8443".parse().unwrap(),
            ],
            vec!["https://app.example.com".parse().unwrap()],
        )
    }

    fn verdict(headers: &[(&str, &str)]) -> Result<(), Refusal> {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.append(
                header::HeaderName::from_bytes(name.as_bytes()).unwrap(),
                value.parse().unwrap(),
            );
        }
        allowed().check(&"/mcp".parse().unwrap(), &map)
    }

    #[test]
    fn names_of_this_server_are_accepted_in_every_spelling() {
        for host in [
            "localhost",
            "LOCALHOST:1234",
            "localhost.",
            "127.0.0.1:8000",
            "[::1]:8000",
            "[0:0::1]",
            "10.0.0.7:8000",
            "cells.example.com",
            "Cells.Example.COM:443",
            "proxied.example.com:8443",
        ] {
            assert_eq!(verdict(&[("host", host)]), Ok(()), "{host}");
        }
    }

    #[test]
    fn other_names_are_refused() {
        for host in [
            "example.com",
            "evil.cells.example.com",
            "cells.example.com.evil.test",
            "proxied.example.com:8444",
            "10.0.0.8:8000",
            "10.0.0.7:8001",
            "127.0.0.2",
            "localhost.evil.test",
            "[::2]",
        ] {
            assert_eq!(
                verdict(&[("host", host)]),
                Err(Refusal::ForeignHost),
                "{host}"
            );
        }
    }

    #[test]
    fn a_request_names_its_host_exactly_once() {
        assert_eq!(verdict(&[]), Err(Refusal::NoHost));
        assert_eq!(
            verdict(&[("host", "localhost"), ("host", "localhost")]),
            Err(Refusal::NoHost)
        );
        for host in [
            "",
            "a b",
            "user@localhost",
            "localhost/path",
            "localhost:80:80",
            "localhost:99999",
        ] {
            assert_eq!(verdict(&[("host", host)]), Err(Refusal::NoHost), "{host}");
        }
    }

    #[test]
    fn an_address_and_a_header_must_name_the_same_host() {
        let mut headers = HeaderMap::new();
        let check =
            |uri: &str, headers: &HeaderMap| allowed().check(&uri.parse().unwrap(), headers);
        assert_eq!(check("http://localhost:8000/mcp", &headers), Ok(()));
        assert_eq!(
            check("http://example.com/mcp", &headers),
            Err(Refusal::ForeignHost)
        );
        headers.insert(header::HOST, HeaderValue::from_static("localhost:8000"));
        assert_eq!(check("http://localhost:8000/mcp", &headers), Ok(()));
        assert_eq!(
            check("http://cells.example.com/mcp", &headers),
            Err(Refusal::NoHost)
        );
    }

    #[test]
    fn pages_of_ours_and_of_listed_origins_are_accepted() {
        for (host, origin) in [
            ("localhost:8000", "http://localhost:8000"),
            ("[::1]:8000", "http://[::1]:8000"),
            ("cells.example.com", "https://cells.example.com"),
            ("localhost:8000", "https://app.example.com"),
            ("localhost:8000", "HTTPS://APP.example.com:443"),
        ] {
            assert_eq!(
                verdict(&[("host", host), ("origin", origin)]),
                Ok(()),
                "{host} {origin}"
            );
        }
    }

    #[test]
    fn pages_of_other_origins_are_refused() {
        for origin in [
            "null",
            "",
            "https://evil.test",
            "http://app.example.com",
            "https://app.example.com:8443",
            "https://app.example.com.evil.test",
            "http://localhost:8001",
            "http://127.0.0.1:8000",
            "file://",
            "chrome-extension://abc",
            "localhost:8000",
        ] {
            let verdict = verdict(&[("host", "localhost:8000"), ("origin", origin)]);
            assert_eq!(verdict, Err(Refusal::ForeignOrigin), "{origin}");
        }
        let twice = [
            ("host", "localhost"),
            ("origin", "http://localhost"),
            ("origin", "http://localhost"),
        ];
        assert_eq!(verdict(&twice), Err(Refusal::ForeignOrigin));
    }

    #[test]
    fn a_host_without_a_port_has_pages_at_its_usual_port_and_ours_only() {
        for origin in [
            "http://localhost",
            "https://localhost",
            "http://localhost:80",
            "http://localhost:8000",
        ] {
            assert_eq!(
                verdict(&[("host", "localhost"), ("origin", origin)]),
                Ok(()),
                "control: {origin}"
            );
        }
        for origin in [
            "http://localhost:3000",
            "https://localhost:80",
            "http://localhost:443",
            "https://localhost:8443",
        ] {
            let verdict = verdict(&[("host", "localhost"), ("origin", origin)]);
            assert_eq!(verdict, Err(Refusal::ForeignOrigin), "{origin}");
        }
    }

    #[test]
    fn headers_of_proxies_change_nothing() {
        for name in [
            "x-forwarded-host",
            "forwarded",
            "x-original-host",
            "x-forwarded-for",
        ] {
            assert_eq!(
                verdict(&[("host", "example.com"), (name, "localhost")]),
                Err(Refusal::ForeignHost),
                "{name}"
            );
        }
    }

    #[test]
    fn only_listed_origins_are_told_to_browsers() {
        let mut headers = HeaderMap::new();
        headers.insert(
            header::ORIGIN,
            HeaderValue::from_static("https://app.example.com"),
        );
        assert_eq!(
            allowed().listed_origin(&headers).unwrap(),
            "https://app.example.com"
        );
        headers.insert(
            header::ORIGIN,
            HeaderValue::from_static("https://evil.test"),
        );
        assert_eq!(allowed().listed_origin(&headers), None);
    }

    #[test]
    fn what_names_no_host_or_origin_cannot_be_listed() {
        for bad in [
            "",
            "a b",
            "*.example.com",
            "https://a.test",
            "user@a.test",
            "a.test:99999",
        ] {
            assert!(bad.parse::<AllowedHost>().is_err(), "{bad}");
        }
        for bad in [
            "",
            "null",
            "a.test",
            "https://a.test/path",
            "https://*.a.test",
            "ftp://a.test",
            "https://u@a.test",
        ] {
            assert!(bad.parse::<Origin>().is_err(), "{bad}");
        }
    }
}
