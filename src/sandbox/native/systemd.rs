//! A D-Bus client of systemd, to obtain a delegated control group.
//!
//! Root uses the system manager, other users use their user manager. Every request is one that the
//! caller could also make with `systemd-run --scope -p Delegate=yes`. Only this module uses the
//! D-Bus library.

use std::path::PathBuf;
use std::time::Duration;

use futures_util::StreamExt;
use zbus::zvariant::{OwnedObjectPath, Value};
use zbus::{Connection, Proxy, connection};

/// Reply timeout. systemd answers within milliseconds, but later on a machine that is starting. A
/// manager that does not answer must not block a server.
const REPLY_TIMEOUT: Duration = Duration::from_secs(15);

const DESTINATION: &str = "org.freedesktop.systemd1";
const SYSTEM_BUS: &str = "/run/dbus/system_bus_socket";

/// A connection to the manager that makes units for this process.
pub(super) struct Manager {
    proxy: Proxy<'static>,
    /// Whether it is a user manager.
    pub(super) is_of_user: bool,
}

impl Manager {
    /// Connects to the system manager as root, otherwise to the user manager.
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

    /// Returns whether a unit of this manager has `Delegate=yes`.
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

    /// Creates a scope around a process, with a control group that is delegated to us. The scope
    /// ends with its last process.
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
            // Each sandbox has its own limit, and the default of a scope is lower than what many
            // sandboxes may use together.
            ("TasksMax", u64::MAX.into()),
            // Stopping the scope is meant to end its sessions, which have nothing to clean up.
            ("KillSignal", SIGKILL.into()),
            // A failed scope does not remain in the list of units.
            ("CollectMode", "inactive-or-failed".into()),
        ];
        properties.extend(slice.map(|slice| ("Slice", slice.into())));
        let auxiliary: Vec<(&str, Vec<(&str, Value<'_>)>)> = Vec::new();
        let starting = async {
            // The job may finish before its number is known here, so the subscription comes first.
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
    match tokio::time::timeout(REPLY_TIMEOUT, asking).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(zbus::Error::MethodError(name, Some(words), _))) => Err(format!("{words} ({name})")),
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err(format!(
            "systemd did not answer within {} s",
            REPLY_TIMEOUT.as_secs()
        )),
    }
}
