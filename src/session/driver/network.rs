//! Network rules of a session: the operator's rules, the caller's narrower ones, and the gateway's
//! requests about other names.

use std::net::SocketAddr;
use std::sync::Arc;

use cellblock_egress::name::HostName;
use cellblock_egress::resolve::BoxFuture;
use tokio::sync::{mpsc, oneshot};

use crate::sandbox::{Asker, LaunchError, Rules, Sandbox};
use crate::session::Refused;
use crate::session::approvals::InForce;

/// Connections that may be queued for a decision. The gateway holds fewer.
const MAX_QUEUED: usize = 64;

/// The rules of a session's network.
pub(super) struct SessionNetwork {
    /// The operator's rules, once there is a sandbox to apply them to.
    ceiling: Option<Rules>,
    /// The narrower rules of a caller, if it gave any.
    narrowed: Option<Rules>,
    /// Connections to names that no rule lists, reported by the gateway.
    wanted: mpsc::Receiver<ConnectionRequest>,
    /// The gateway's sender for `wanted`.
    wants: mpsc::Sender<ConnectionRequest>,
}

impl SessionNetwork {
    pub(super) fn new() -> SessionNetwork {
        let (wants, wanted) = mpsc::channel(MAX_QUEUED);
        SessionNetwork {
            ceiling: None,
            narrowed: None,
            wanted,
            wants,
        }
    }

    /// Waits for a connection to a name that no rule lists.
    pub(super) async fn next(&mut self) -> ConnectionRequest {
        let wanted = self.wanted.recv().await;
        wanted.expect("this part holds a sender itself")
    }

    /// Returns the operator's rules, for a copy of the session.
    pub(super) fn ceiling(&self) -> Option<&Rules> {
        self.ceiling.as_ref()
    }

    /// Returns whether a caller has narrowed the rules. In that case no approval is requested for
    /// other names.
    pub(super) fn is_narrowed(&self) -> bool {
        self.narrowed.is_some()
    }

    /// Applies the rules to a new sandbox. A copy has the ceiling of its source; a fresh sandbox
    /// has exactly the operator's rules.
    pub(super) fn attach(
        &mut self,
        sandbox: &dyn Sandbox,
        inherited: Option<&Rules>,
        approvals: Option<&InForce>,
    ) {
        let allowed = inherited.cloned().or(self.ceiling.take());
        self.ceiling = Some(allowed.unwrap_or_else(|| sandbox.rules()));
        if let Some(rules) = &self.narrowed {
            sandbox.set_rules(rules.clone());
        }
        // Also set when the policy currently requires no approval: the policy can change.
        if let Some(approvals) = approvals {
            sandbox.set_asker(Some(Arc::new(NameAsker {
                approvals: approvals.clone(),
                wanted: self.wants.clone(),
            })));
        }
    }

    /// Changes the rules from the starting cell on. Refuses rules that exceed the operator's.
    pub(super) fn narrow(
        &mut self,
        rules: Rules,
        sandbox: Option<&dyn Sandbox>,
    ) -> Result<(), Refused> {
        let (Some(sandbox), Some(ceiling)) = (sandbox, &self.ceiling) else {
            return Err(Refused::Launch(LaunchError::Start {
                why: "its sandbox is gone".to_owned(),
            }));
        };
        let rules = rules.under_denials_of(ceiling);
        if let Some(rule) = rules.beyond(ceiling) {
            return Err(Refused::BeyondRules {
                rule: rule.to_string(),
            });
        }
        sandbox.set_rules(rules.clone());
        self.narrowed = Some(rules);
        Ok(())
    }
}

/// A connection that the gateway holds.
pub(super) struct ConnectionRequest {
    pub(super) name: String,
    pub(super) port: u16,
    pub(super) reply: oneshot::Sender<bool>,
}

/// Forwards the gateway's requests about names to the session.
struct NameAsker {
    approvals: InForce,
    wanted: mpsc::Sender<ConnectionRequest>,
}

impl Asker for NameAsker {
    fn may_allow(&self, name: &HostName) -> bool {
        self.approvals.now().policy.may_open(name.as_ref())
    }

    fn ask(&self, name: &HostName, port: u16, _from: SocketAddr) -> BoxFuture<'static, bool> {
        let (wanted, name) = (self.wanted.clone(), name.to_string());
        Box::pin(async move {
            let (reply, answer) = oneshot::channel();
            // A session that is gone allows nothing.
            wanted
                .send(ConnectionRequest { name, port, reply })
                .await
                .is_ok()
                && answer.await.unwrap_or(false)
        })
    }
}
