//! One caller: calls that are answered in time, and cells that are followed to their end.

use std::fmt::Display;
use std::net::SocketAddr;
use std::time::Duration;

use serde_json::{Value, json};

use crate::http_client::HttpClient;

/// A call that is not answered in such a time counts as one without an answer.
const PATIENCE: Duration = Duration::from_secs(180);

/// What can be wrong with a step.
#[derive(Debug)]
pub(crate) enum Trouble {
    WrongAnswer(String),
    NoAnswer(String),
}

pub(crate) fn wrong<T>(what: &str, wanted: impl Display, got: impl Display) -> Result<T, Trouble> {
    Err(Trouble::WrongAnswer(format!(
        "{what}\n  wanted: {wanted}\n  got:    {got}"
    )))
}

pub(crate) struct Caller {
    client: HttpClient,
    address: SocketAddr,
    key: String,
    /// A call was given up; its outcome may not have been collected.
    abandoned: bool,
    calls: Vec<Duration>,
}

impl Caller {
    pub(crate) async fn connect(address: SocketAddr, key: String) -> anyhow::Result<Caller> {
        let client = HttpClient::connect(address, Some(&key)).await?;
        Ok(Caller {
            client,
            address,
            key,
            abandoned: false,
            calls: Vec::new(),
        })
    }

    /// Closes the connection and opens another one.
    pub(crate) async fn reconnect(&mut self) -> anyhow::Result<()> {
        self.client = HttpClient::connect(self.address, Some(&self.key)).await?;
        Ok(())
    }

    /// How long each call took since this was last asked.
    pub(crate) fn take_calls(&mut self) -> Vec<Duration> {
        std::mem::take(&mut self.calls)
    }

    pub(crate) async fn call(
        &mut self,
        tool: &'static str,
        arguments: &Value,
    ) -> Result<Value, Trouble> {
        let no_answer = |why: String| Trouble::NoAnswer(format!("{tool} {arguments}: {why}"));
        match tokio::time::timeout(PATIENCE, self.client.call(tool, arguments)).await {
            Ok(Ok((result, elapsed))) => {
                self.calls.push(elapsed);
                Ok(result)
            }
            Ok(Err(error)) => Err(no_answer(format!("{error:#}"))),
            Err(_) => Err(no_answer(format!("nothing for {} s", PATIENCE.as_secs()))),
        }
    }

    /// Gives up a call after a while by closing its connection.
    pub(crate) async fn abandon(
        &mut self,
        tool: &'static str,
        arguments: &Value,
        soon: Duration,
    ) -> Result<(), Trouble> {
        if let Ok(answered) = tokio::time::timeout(soon, self.client.call(tool, arguments)).await {
            return wrong(
                "answer of a cell that sleeps",
                "none",
                format!("{answered:?}"),
            );
        }
        self.abandoned = true;
        self.reconnect()
            .await
            .map_err(|error| Trouble::NoAnswer(format!("{error:#}")))
    }

    /// Runs a cell to its end.
    pub(crate) async fn run(
        &mut self,
        session: &str,
        code: &str,
        more: Value,
    ) -> Result<Ended, Trouble> {
        let mut arguments = json!({"session_id": session, "code": code});
        for (name, value) in more.as_object().into_iter().flatten() {
            arguments[name] = value.clone();
        }
        self.ended(session, "execute_ipython_cell", &arguments)
            .await
    }

    /// Calls a tool, and `check_execution` for as long as the answer is that the work goes on.
    pub(crate) async fn ended(
        &mut self,
        session: &str,
        tool: &'static str,
        arguments: &Value,
    ) -> Result<Ended, Trouble> {
        let mut checks = 0;
        let mut result = self.call(tool, arguments).await?;
        loop {
            let content = result["structuredContent"].take();
            let goes_on = matches!(content["status"].as_str(), Some("running" | "waiting"));
            // The outcome of an earlier cell that was given up comes first.
            let is_abandoned = checks > 0 && self.abandoned && content["status"] == "cancelled";
            if !goes_on && !is_abandoned {
                if content.is_null() {
                    return wrong("answer", "structured content", &result);
                }
                let text = content["text"].as_str().unwrap_or_default().to_owned();
                return Ok(Ended { text, content });
            }
            self.abandoned &= !is_abandoned;
            checks += 1;
            result = self
                .call("check_execution", &json!({"session_id": session}))
                .await?;
        }
    }

    /// Collects the outcome of a cell that was given up, if it is still kept.
    pub(crate) async fn collect_abandoned(&mut self, session: &str) -> Result<(), Trouble> {
        if std::mem::take(&mut self.abandoned) {
            let result = self
                .call("check_execution", &json!({"session_id": session}))
                .await?;
            let is_last = result["content"]
                .to_string()
                .contains("this is the result that was told last");
            if result["structuredContent"]["status"] != "cancelled" && !is_last {
                return wrong("outcome of a cancelled cell", "cancelled", &result);
            }
        }
        Ok(())
    }
}

/// How a cell ended.
pub(crate) struct Ended {
    /// All that it printed, also what earlier answers have told.
    pub(crate) text: String,
    pub(crate) content: Value,
}

impl Ended {
    pub(crate) fn expect_status(&self, wanted: &str) -> Result<(), Trouble> {
        if self.content["status"] == wanted {
            Ok(())
        } else {
            wrong("status", wanted, &self.content)
        }
    }

    /// The state that the cell has shown, exactly once.
    pub(crate) fn shown(&self) -> Result<Value, Trouble> {
        let shown: Vec<&str> = self
            .text
            .lines()
            .filter_map(|line| line.strip_prefix("=> "))
            .collect();
        match shown.as_slice() {
            [state] => {
                serde_json::from_str(state).or_else(|_| wrong("output", "a state", &self.text))
            }
            _ => wrong("output", "one state", &self.text),
        }
    }
}
