//! systemd, asked over D-Bus for what only it may give: a control group that it leaves to us.
//!
//! Root asks the manager of the system, everybody else the manager of the user. Nothing is asked
//! for that the caller could not have with `systemd-run --scope -p Delegate=yes`. This is the only
//! module that knows the D-Bus library.

use std::path::PathBuf;
use std::time::Duration;

use futures_util::StreamExt;
use zbus::zvariant::{OwnedObjectPath, Value};
use zbus::{Connection, Proxy, connection};

/// systemd answers within milliseconds. A machine that is starting may be busy; one that does not
/// answer at all must not hold a server up.
const ANSWER_LIMIT: Duration = Duration::from_secs(15);

const DESTINATION: &str = "org.freedesktop.systemd1";
const SYSTEM_BUS: &str = "/run/dbus/system_bus_socket";

/// A connection to the manager whose units this process may make.
pub(super) struct Manager {
    proxy: Proxy<'static>,
    /// Whether it is the user's own manager.
    pub(super) is_of_user: bool,
}

impl Manager {
    /// Connects to the manager of the system as root, and of the user otherwise.
    pub(super) async fn connect() -> Result<Manager, String> {
        let user = rustix::process::geteuid();
        let is_of_user = !user.is_root();
        let socket = if is_of_user {
            PathBuf::from(format!("/run/user/{}/bus", user.as_raw()))
        } else {
            PathBuf::from(SYSTEM_BUS)
        };
        if !socket.exists() {
            return Err(format!("there is no bus at {}", socket.display()));
        }
        let connecting = async {
            let address = format!("unix:path={}", socket.display());
            let connection: Connection = connection::Builder::address(address.as_str())?
                .build()
                .await?;
            Proxy::new_owned(
                connection,
                DESTINATION,
                "/org/freedesktop/systemd1",
                "org.freedesktop.systemd1.Manager",
            )
            .await
        };
        let proxy = within_limit(connecting).await?;
        Ok(Manager { proxy, is_of_user })
    }

    /// Tells whether a unit of this manager has `Delegate=yes`.
    pub(super) async fn delegates(&self, unit: &str) -> Result<bool, String> {
        let interface = if unit.ends_with(".scope") {
            "Scope"
        } else {
            "Service"
        };
        let asking = async {
            let path: OwnedObjectPath = self.proxy.call("GetUnit", &(unit,)).await?;
            let interface = format!("{DESTINATION}.{interface}");
            Proxy::new(self.proxy.connection(), DESTINATION, path, interface)
                .await?
                .get_property("Delegate")
                .await
        };
        within_limit(asking).await
    }

    /// Has a scope made around a process, with a control group that is delegated to us. It goes
    /// when the last process in it ends.
    pub(super) async fn start_scope(
        &self,
        name: &str,
        process: u32,
        slice: Option<&str>,
    ) -> Result<(), String> {
        const SIGKILL: i32 = 9;
        let mut properties: Vec<(&str, Value<'_>)> = vec![
            ("Description", "Sessions of Cellblock".into()),
            ("PIDs", vec![process].into()),
            ("Delegate", true.into()),
            // Each sandbox has a limit of its own, and the default of a scope is less than what
            // many of them may have together.
            ("TasksMax", u64::MAX.into()),
            // Whoever stops the scope wants its sessions gone, and they have nothing to tidy up.
            ("KillSignal", SIGKILL.into()),
            // A failed scope does not stay in the list of units.
            ("CollectMode", "inactive-or-failed".into()),
        ];
        properties.extend(slice.map(|slice| ("Slice", slice.into())));
        let auxiliary: Vec<(&str, Vec<(&str, Value<'_>)>)> = Vec::new();
        let starting = async {
            // The job may end before its number is known here, so listening comes first.
            let mut ends = self.proxy.receive_signal("JobRemoved").await?;
            let _: () = self.proxy.call("Subscribe", &()).await?;
            let job: OwnedObjectPath = self
                .proxy
                .call("StartTransientUnit", &(name, "fail", properties, auxiliary))
                .await?;
            while let Some(end) = ends.next().await {
                let (_, path, _, result): (u32, OwnedObjectPath, String, String) =
                    end.body().deserialize()?;
                if path == job {
                    return Ok(result);
                }
            }
            Err(zbus::Error::InterfaceNotFound)
        };
        match within_limit(starting).await?.as_str() {
            "done" => Ok(()),
            result => Err(format!("systemd could not start {name}: {result}")),
        }
    }
}

async fn within_limit<T>(asking: impl Future<Output = zbus::Result<T>>) -> Result<T, String> {
    match tokio::time::timeout(ANSWER_LIMIT, asking).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(zbus::Error::MethodError(name, Some(words), _))) => Err(format!("{words} ({name})")),
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err(format!(
            "systemd did not answer within {} s",
            ANSWER_LIMIT.as_secs()
        )),
    }
}
