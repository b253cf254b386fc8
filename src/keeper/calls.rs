//! The keeper's side of every call: what arrived as a value becomes a method of the sessions.

use serde::Serialize;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_util::sync::CancellationToken;

use super::frame::{self, Kind, Written};
use super::message::{Answer, Call};
use crate::session::{News, Refused, SessionAccess};

/// What a call has beside its values.
pub(super) struct Hands<Source, Sink> {
    pub(super) cancel: CancellationToken,
    pub(super) news: News,
    /// A file that comes from the front.
    pub(super) source: Source,
    /// A file that goes to the front.
    pub(super) sink: Sink,
}

/// Carries a call out and returns its answer, written.
pub(super) async fn carry_out(
    sessions: &dyn SessionAccess,
    number: u64,
    call: Call,
    hands: Hands<impl AsyncRead + Send + Unpin, impl AsyncWrite + Send + Unpin>,
) -> Vec<Written> {
    let Hands {
        cancel,
        news,
        mut source,
        mut sink,
    } = hands;
    match call {
        Call::Execute {
            owner,
            id,
            request,
            wait,
        } => written(
            number,
            &sessions
                .execute(&owner, &id, request, wait, cancel, news)
                .await,
        ),
        Call::Check {
            owner,
            which,
            wait,
            max_chars,
        } => written(
            number,
            &sessions.check(&owner, &which, wait, max_chars, news).await,
        ),
        Call::Decide {
            owner,
            handle,
            decisions,
        } => written(
            number,
            &sessions.decide(&owner, &handle, decisions, "").await,
        ),
        Call::Stop { owner, which } => written(number, &sessions.stop(&owner, &which).await),
        Call::Reset { owner, id } => written(number, &sessions.reset(&owner, &id).await),
        Call::Undo { owner, id, cells } => {
            written(number, &sessions.undo(&owner, &id, cells).await)
        }
        Call::Checkpoints { owner, id } => {
            written(number, &sessions.checkpoints(&owner, &id).await)
        }
        Call::Fork { owner, id, request } => {
            written(number, &sessions.fork(&owner, &id, request).await)
        }
        Call::Explore { owner, id, request } => written(
            number,
            &sessions.explore(&owner, &id, request, cancel, news).await,
        ),
        Call::Install {
            owner,
            id,
            requirements,
            leave,
        } => written(
            number,
            &sessions
                .install(&owner, &id, requirements, leave, cancel, news)
                .await,
        ),
        Call::RegisterServer { owner, request } => {
            written(number, &sessions.register_server(&owner, request).await)
        }
        Call::SetUpServers { setup } => written(number, &sessions.set_up_servers(setup).await),
        Call::SetUpApprovals { setup } => written(number, &sessions.set_up_approvals(setup).await),
        Call::SetUpLimits { setup } => written(number, &sessions.set_up_limits(setup).await),
        Call::UnregisterServer { owner, name } => {
            written(number, &sessions.unregister_server(&owner, &name).await)
        }
        Call::Servers { owner } => written(number, &sessions.servers(&owner).await),
        Call::WriteFile {
            owner,
            id,
            path,
            overwrite,
        } => written(
            number,
            &sessions
                .write_file(&owner, &id, &path, &mut source, overwrite)
                .await,
        ),
        Call::ReadFile {
            owner,
            id,
            path,
            limit,
        } => written(
            number,
            &sessions
                .read_file(&owner, &id, &path, limit, &mut sink)
                .await,
        ),
        Call::ReadFileRange {
            owner,
            id,
            path,
            offset,
            length,
        } => written(
            number,
            &sessions
                .read_file_range(&owner, &id, &path, offset, length, &mut sink)
                .await,
        ),
        Call::ListFiles { owner, id } => written(number, &sessions.list_files(&owner, &id).await),
        Call::Upload {
            owner,
            id,
            path,
            part,
        } => written(
            number,
            &sessions.upload(&owner, &id, &path, part, &mut source).await,
        ),
        Call::Uploaded { owner, id, path } => written(
            number,
            &Answer::Ok(sessions.uploaded(&owner, &id, &path).await),
        ),
        Call::Load => written(number, &Answer::Ok(sessions.load().await)),
        Call::List { owner } => written(number, &sessions.list(&owner).await),
        Call::Close { owner, id } => written(number, &sessions.close(&owner, &id).await),
        Call::OutputSize {
            owner,
            id,
            execution,
        } => written(
            number,
            &Answer::Ok(sessions.output_size(&owner, &id, execution).await),
        ),
        Call::ReadOutput {
            owner,
            id,
            execution,
            offset,
            length,
        } => {
            let read = sessions
                .read_output(&owner, &id, execution, offset, length)
                .await;
            // The kind only: it is all that is told of it.
            let read = read.map(|read| read.map_err(|error| error.kind().to_string()));
            written(number, &Answer::Ok(read))
        }
    }
}

/// Writes an answer, or says that it is too large to be sent.
pub(super) fn written<T: Serialize>(number: u64, answer: &Answer<T>) -> Vec<Written> {
    frame::write(number, Kind::Answer, answer).unwrap_or_else(|_| {
        let why = "the answer is too large to be handed on".to_owned();
        let refused: Answer<()> = Err(Refused::Transfer { why });
        frame::write(number, Kind::Answer, &refused).expect("a refusal is short")
    })
}
