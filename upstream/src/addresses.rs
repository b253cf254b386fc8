//! Policy for the addresses of servers.
//!
//! With [`AddressPolicy::PublicOnly`] a name is resolved here, all its addresses are checked, and
//! the connection goes to one of exactly those. One special address among them rejects the name. An
//! IP address in the URL itself is checked before dialling, because it is never resolved.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use cellblock_egress::address::special;
use cellblock_egress::name::HostName;
use cellblock_egress::resolve::Resolver;
use reqwest::Url;
use reqwest::dns::{Addrs, Name, Resolve, Resolving};

/// Addresses at which servers may be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AddressPolicy {
    /// Any address: the caller may reach everything that this machine can reach.
    Any,
    /// Ordinary public addresses, and these hosts at any address.
    PublicOnly { allowed: Vec<String> },
}

/// Error of a rejected address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    #[error("the host is {kind}, and only public addresses may be used")]
    Special { kind: &'static str },
    #[error("the name leads to {kind}, and only public addresses may be used")]
    LeadsToSpecial { kind: &'static str },
    #[error("the name of the host cannot be used")]
    Name,
}

impl AddressPolicy {
    /// Checks a URL as far as possible before its name is resolved.
    pub(crate) fn check(&self, url: &Url) -> Result<(), AddressError> {
        let AddressPolicy::PublicOnly { .. } = self else {
            return Ok(());
        };
        let text = url.host_str().unwrap_or_default();
        if self.lists(text) {
            return Ok(());
        }
        match literal(text).map(special) {
            Some(Some(kind)) => Err(AddressError::Special { kind }),
            Some(None) => Ok(()),
            None => HostName::parse(text)
                .map(drop)
                .map_err(|_| AddressError::Name),
        }
    }

    fn lists(&self, host: &str) -> bool {
        match self {
            AddressPolicy::Any => true,
            AddressPolicy::PublicOnly { allowed } => {
                let bare = |name: &str| {
                    name.trim_end_matches('.')
                        .trim_matches(['[', ']'])
                        .to_ascii_lowercase()
                };
                allowed.iter().any(|name| bare(name) == bare(host))
            }
        }
    }
}

fn literal(host: &str) -> Option<IpAddr> {
    host.trim_matches(['[', ']']).parse().ok()
}

/// Resolver for the HTTP client that applies the policy.
pub(crate) struct CheckedNames {
    pub(crate) policy: AddressPolicy,
    pub(crate) resolver: Arc<dyn Resolver>,
}

impl Resolve for CheckedNames {
    fn resolve(&self, name: Name) -> Resolving {
        let (policy, resolver) = (self.policy.clone(), Arc::clone(&self.resolver));
        Box::pin(async move {
            let addresses = checked(&policy, &*resolver, name.as_str()).await?;
            Ok(Box::new(addresses.into_iter()) as Addrs)
        })
    }
}

async fn checked(
    policy: &AddressPolicy,
    resolver: &dyn Resolver,
    name: &str,
) -> io::Result<Vec<SocketAddr>> {
    let refuse = |error: AddressError| io::Error::new(io::ErrorKind::PermissionDenied, error);
    let host = HostName::parse(name).map_err(|_| refuse(AddressError::Name))?;
    let addresses = resolver.resolve(&host).await?;
    if !policy.lists(name)
        && let Some(kind) = addresses.iter().find_map(|address| special(*address))
    {
        return Err(refuse(AddressError::LeadsToSpecial { kind }));
    }
    // The port of the URL replaces this one.
    Ok(addresses
        .into_iter()
        .map(|address| SocketAddr::new(address, 0))
        .collect())
}

#[cfg(test)]
mod tests {
    use cellblock_egress::resolve::BoxFuture;

    use super::*;

    struct Fixed(Vec<IpAddr>);

    impl Resolver for Fixed {
        fn resolve<'a>(&'a self, _name: &'a HostName) -> BoxFuture<'a, io::Result<Vec<IpAddr>>> {
            Box::pin(async { Ok(self.0.clone()) })
        }
    }

    fn public_only(allowed: &[&str]) -> AddressPolicy {
        AddressPolicy::PublicOnly {
            allowed: allowed.iter().map(|name| (*name).to_owned()).collect(),
        }
    }

    #[test]
    fn an_address_in_a_url_must_be_public_or_listed() {
        for url in [
            "http://127.0.0.1/mcp",
            "http://2130706433/mcp",
            "http://0x7f.1/mcp",
            "http://169.254.169.254/latest",
            "http://10.0.0.1:8080/mcp",
            "http://[::1]/mcp",
            "http://[::ffff:10.0.0.1]/mcp",
            "http://[64:ff9b::a9fe:a9fe]/mcp",
            "http://0.0.0.0/mcp",
        ] {
            let url = Url::parse(url).unwrap();
            assert!(
                matches!(
                    public_only(&[]).check(&url),
                    Err(AddressError::Special { .. })
                ),
                "{url}"
            );
            // Controls: the same address, listed; and no policy.
            let host = url.host_str().unwrap().to_owned();
            assert_eq!(public_only(&[&host]).check(&url), Ok(()), "{url}");
            assert_eq!(AddressPolicy::Any.check(&url), Ok(()), "{url}");
        }
        for url in [
            "https://93.184.216.34/mcp",
            "https://example.com/mcp",
            "https://[2606:4700:4700::1111]/mcp",
        ] {
            assert_eq!(
                public_only(&[]).check(&Url::parse(url).unwrap()),
                Ok(()),
                "{url}"
            );
        }
    }

    #[tokio::test]
    async fn a_name_must_lead_to_public_addresses_only() {
        let public: IpAddr = "93.184.216.34".parse().unwrap();
        for private in [
            "10.1.2.3",
            "127.0.0.1",
            "169.254.169.254",
            "fd00::1",
            "::ffff:192.168.0.1",
        ] {
            let mixed = Fixed(vec![public, private.parse().unwrap()]);
            let error = checked(&public_only(&["other.example"]), &mixed, "a.example")
                .await
                .unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::PermissionDenied, "{private}");
            // Control: listed by its name.
            assert_eq!(
                checked(&public_only(&["A.example"]), &mixed, "a.example")
                    .await
                    .unwrap()
                    .len(),
                2
            );
        }
        assert_eq!(
            checked(&public_only(&[]), &Fixed(vec![public]), "a.example")
                .await
                .unwrap()
                .len(),
            1
        );
    }
}
