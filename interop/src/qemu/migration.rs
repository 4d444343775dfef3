//! Migration with QEMU's own monitor commands.

use std::time::Instant;

use serde_json::{Map, Value, json};

use super::{PATIENCE, Qemu, STEP};
use crate::Failure;

impl Qemu {
    /// Switches migration capabilities on.
    ///
    /// # Errors
    /// The refusal of QEMU.
    pub fn capabilities(&mut self, names: &[&str]) -> Result<(), Failure> {
        self.switch(names, true)
    }

    /// Switches migration capabilities off.
    ///
    /// # Errors
    /// The refusal of QEMU.
    pub fn capabilities_off(&mut self, names: &[&str]) -> Result<(), Failure> {
        self.switch(names, false)
    }

    fn switch(&mut self, names: &[&str], state: bool) -> Result<(), Failure> {
        let list: Vec<Value> = names.iter().map(|name| json!({"capability": name, "state": state})).collect();
        self.execute("migrate-set-capabilities", json!({ "capabilities": list })).map(drop)
    }

    /// Sets parameters with `migrate-set-parameters`.
    ///
    /// # Errors
    /// The refusal of QEMU.
    pub fn parameters(&mut self, parameters: Value) -> Result<(), Failure> {
        self.execute("migrate-set-parameters", parameters).map(drop)
    }

    /// Starts a migration to `uri` (`tcp:…`, `unix:…`, `file:…`).
    ///
    /// # Errors
    /// The refusal of QEMU.
    pub fn start_migration(&mut self, uri: &str) -> Result<(), Failure> {
        self.execute("migrate", json!({ "uri": uri })).map(drop)
    }

    /// Migrates to `uri` and waits for the end. Bandwidth is unlimited, and the downtime limit is 10 s. On a
    /// busy host, the default limit of 300 ms may be too short for this guest.
    ///
    /// # Errors
    /// The refusal of QEMU, or the reason for which the migration failed.
    pub fn migrate(&mut self, uri: &str) -> Result<Value, Failure> {
        self.parameters(json!({ "max-bandwidth": 0, "downtime-limit": 10_000 }))?;
        self.start_migration(uri)?;
        self.wait_for_migration()
    }

    /// Loads from `uri` and waits until everything is loaded. The guest runs if it ran at the source of a
    /// live migration. From a file, it may stay stopped until [`resume`](Qemu::resume).
    ///
    /// # Errors
    /// The refusal of QEMU, or the reason for which the migration failed.
    pub fn incoming(&mut self, uri: &str) -> Result<(), Failure> {
        self.start_incoming(uri)?;
        self.wait_for_migration().map(drop)
    }

    /// Listens at `uri`, or starts to load from it. QEMU does not exit on errors.
    ///
    /// # Errors
    /// The refusal of QEMU.
    pub fn start_incoming(&mut self, uri: &str) -> Result<(), Failure> {
        self.execute("migrate-incoming", json!({ "uri": uri, "exit-on-error": false })).map(drop)
    }

    /// Listens on a free TCP port of loopback. Returns the port.
    ///
    /// # Errors
    /// The refusal of QEMU.
    pub fn listen_on_tcp(&mut self) -> Result<u16, Failure> {
        self.start_incoming("tcp:127.0.0.1:0")?;
        let state = self.execute("query-migrate", Value::Null)?;
        let port = state["socket-address"][0]["port"].as_str().and_then(|port| port.parse().ok());
        port.ok_or_else(|| format!("query-migrate names no port: {state}"))
    }

    /// Listens on a Unix socket in the machine's directory. Returns the URI.
    ///
    /// # Errors
    /// The refusal of QEMU.
    pub fn listen_on_unix(&mut self) -> Result<String, Failure> {
        let uri = format!("unix:{}/incoming", self.directory().display());
        self.start_incoming(&uri)?;
        Ok(uri)
    }

    /// Waits for the end of the running migration, in either direction. Returns the answer to
    /// `query-migrate`.
    ///
    /// # Errors
    /// The reason for which the migration failed, or that it was cancelled.
    pub fn wait_for_migration(&mut self) -> Result<Value, Failure> {
        let begin = Instant::now();
        loop {
            let state = self.unfailed_migration()?;
            match state["status"].as_str() {
                Some("completed") => return Ok(state),
                _ if begin.elapsed() > PATIENCE => {
                    return Err(self.explain(&format!("QEMU's migration does not end: {state}")));
                }
                _ => std::thread::sleep(STEP),
            }
        }
    }

    /// The answer to `query-migrate` for a migration that has not failed.
    ///
    /// # Errors
    /// The reason for which the migration failed, or that it was cancelled.
    pub fn unfailed_migration(&mut self) -> Result<Value, Failure> {
        let state = self.execute("query-migrate", Value::Null)?;
        match state["status"].as_str() {
            Some(end @ ("failed" | "cancelled")) => {
                let why = state["error-desc"].as_str().unwrap_or("no reason given");
                Err(self.explain(&format!("QEMU's migration has {end}: {why}")))
            }
            _ => Ok(state),
        }
    }

    /// Names of the capabilities that are on.
    ///
    /// # Errors
    /// As for [`execute`](Qemu::execute).
    pub fn capabilities_on(&mut self) -> Result<Vec<String>, Failure> {
        let list = self.execute("query-migrate-capabilities", Value::Null)?;
        let on = list.as_array().into_iter().flatten().filter(|entry| entry["state"] == true);
        Ok(on.filter_map(|entry| entry["capability"].as_str().map(str::to_owned)).collect())
    }

    /// The parameters in `query-migrate-parameters`.
    ///
    /// # Errors
    /// As for [`execute`](Qemu::execute).
    pub fn parameters_set(&mut self) -> Result<Map<String, Value>, Failure> {
        match self.execute("query-migrate-parameters", Value::Null)? {
            Value::Object(map) => Ok(map),
            other => Err(format!("query-migrate-parameters returned {other}")),
        }
    }
}
