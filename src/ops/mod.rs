//! Operations: everything that a caller can ask of sessions, as values.
//!
//! ```text
//!  front (MCP, HTTP)        Op ──▶ Host::submit ──▶ Ticket ──▶ Reply
//!                                     │
//!                 audit log ──────────┤  each layer implements `submit` and hands the value on
//!                 session daemon ─────┤
//!                 sessions ───────────┘  carry it out
//! ```
//!
//! Each operation is a struct in a file of its own; the table below names its reply and the session
//! that it is about. `Op` and `Reply` travel between processes, so they are a wire format: fields
//! may be added with a default, other changes raise `daemon::PROTOCOL`. `golden` holds an example
//! of each operation and reply. Nothing in them depends on the machine of the caller: contents of
//! files travel beside them as streams, in [`Io`].
//!
//! An operation has no behaviour here. `session::host` carries operations out.

#[cfg(test)]
pub(crate) mod golden;
mod host;

use serde::{Deserialize, Serialize};

use crate::session::install::InstallReport;
use crate::session::servers::ServerReport;
use crate::session::{
    CheckpointInfo, DecideReport, ExecutionHandle, ExecutionRef, ExecutionReport, ExploreReport,
    FileList, FileRange, ForkReport, Load, ResetReport, SessionId, SessionInfo, Slice, UndoReport,
    Uploaded,
};
pub use host::{Body, Host, HostExt, Io, ProgressChannel, Ticket};

/// A request with a reply of its own type.
pub trait Operation: Into<Op> + Send {
    type Output;
    const NAME: &'static str;

    /// Takes the output out of a reply, if the reply belongs to this operation.
    fn output(reply: Reply) -> Option<Self::Output>;
}

/// What an operation is about, as far as its fields say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OpSubject<'a> {
    Session(&'a SessionId),
    Execution(&'a ExecutionRef),
    Handle(&'a ExecutionHandle),
    /// No session, or one that need not exist.
    Other,
}

macro_rules! operations {
    ($($module:ident::$name:ident about $subject:ident => $output:ty,)*) => {
        $(mod $module; pub use $module::$name;)*

        /// A request to a host of sessions.
        #[derive(Clone, Serialize, Deserialize)]
        #[serde(rename_all = "snake_case")]
        pub enum Op {
            $($name($name),)*
        }

        /// What an operation returned. The variant has the name of the operation.
        #[derive(Debug, Clone, Serialize, Deserialize)]
        #[serde(rename_all = "snake_case")]
        pub enum Reply {
            $($name($output),)*
        }

        impl Op {
            /// The names of all operations.
            pub const NAMES: &[&'static str] = &[$($name::NAME,)*];

            /// The name on the wire, in logs and in tests.
            pub fn name(&self) -> &'static str {
                match self {
                    $(Op::$name(_) => $name::NAME,)*
                }
            }

            pub fn subject(&self) -> OpSubject<'_> {
                match self {
                    $(Op::$name(op) => subject!(op, $subject),)*
                }
            }
        }

        $(
            impl Operation for $name {
                type Output = $output;
                const NAME: &'static str = stringify!($module);

                fn output(reply: Reply) -> Option<$output> {
                    match reply {
                        Reply::$name(output) => Some(output),
                        _ => None,
                    }
                }
            }

            impl From<$name> for Op {
                fn from(op: $name) -> Op {
                    Op::$name(op)
                }
            }
        )*
    };
}

macro_rules! subject {
    ($op:ident, session) => {
        OpSubject::Session(&$op.session)
    };
    ($op:ident, execution) => {
        OpSubject::Execution(&$op.execution)
    };
    ($op:ident, handle) => {
        OpSubject::Handle(&$op.execution)
    };
    ($op:ident, none) => {{
        let _ = $op;
        OpSubject::Other
    }};
}

operations! {
    execute::Execute about session => ExecutionReport,
    check::Check about execution => ExecutionReport,
    decide::Decide about handle => DecideReport,
    interrupt::Interrupt about execution => (),
    reset::Reset about session => ResetReport,
    undo::Undo about session => UndoReport,
    list_checkpoints::ListCheckpoints about session => Vec<CheckpointInfo>,
    fork::Fork about session => ForkReport,
    explore::Explore about session => ExploreReport,
    install::Install about session => InstallReport,
    register_server::RegisterServer about none => ServerReport,
    unregister_server::UnregisterServer about none => (),
    list_servers::ListServers about none => Vec<ServerReport>,
    set_servers::SetServers about none => (),
    set_approvals::SetApprovals about none => (),
    set_limits::SetLimits about none => (),
    write_file::WriteFile about session => u64,
    read_file::ReadFile about session => u64,
    read_file_range::ReadFileRange about session => FileRange,
    list_files::ListFiles about session => FileList,
    upload::Upload about session => Uploaded,
    upload_size::UploadSize about none => Option<u64>,
    get_load::GetLoad about none => Load,
    list_sessions::ListSessions about none => Vec<SessionInfo>,
    close_session::CloseSession about session => (),
    output_size::OutputSize about none => Option<u64>,
    read_output::ReadOutput about none => Option<Slice>,
}

/// Where the contents of a file go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TransferDirection {
    /// From the call's source into the session.
    Into,
    /// Out of the session to the call's sink.
    OutOf,
}

impl Op {
    /// Tells whether the operation moves the contents of a file, and where.
    pub fn transfer(&self) -> Option<TransferDirection> {
        match self {
            Op::WriteFile(_) | Op::Upload(_) => Some(TransferDirection::Into),
            Op::ReadFile(_) | Op::ReadFileRange(_) => Some(TransferDirection::OutOf),
            _ => None,
        }
    }
}

// Code and names of files do not belong in a log.
impl std::fmt::Debug for Op {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(self.name())
    }
}
