//! The commands of a QEMU that these tests need. Additional monitors answer on the descriptor that they got.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};

/// A QEMU. 10.0 by default, which has no additional monitors.
#[derive(Default)]
pub struct Qemu {
    /// Whether it is 11.1.
    pub is_new: bool,
    /// A new monitor closes its end in place of a greeting.
    pub is_mute: bool,
    /// Every command, without its arguments.
    pub executed: Vec<String>,
    /// Named descriptors.
    pub named: HashMap<String, OwnedFd>,
    /// Character devices, each with its end of a connection, and whether the other end is closed.
    pub devices: Arc<Mutex<HashMap<String, Device>>>,
    /// Names of additional monitors.
    pub monitors: Arc<Mutex<Vec<String>>>,
}

#[derive(Default)]
pub struct Device {
    pub end: Option<UnixStream>,
    pub is_closed: bool,
}

impl Qemu {
    pub fn execute(&mut self, command: &Value, files: Vec<OwnedFd>) -> Value {
        let name = command["execute"].as_str().unwrap_or_default().to_owned();
        self.executed.push(name.clone());
        match self.result(&name, &command["arguments"], files) {
            Ok(result) => json!({ "return": result }),
            Err(why) => json!({"error": {"class": "GenericError", "desc": why}}),
        }
    }

    fn result(&mut self, name: &str, arguments: &Value, files: Vec<OwnedFd>) -> Result<Value, String> {
        let text = |name: &str| arguments[name].as_str().unwrap_or_default().to_owned();
        let (id, done) = (text("id"), Ok(json!({})));
        match name {
            "query-version" => {
                let (major, minor) = if self.is_new { (11, 1) } else { (10, 0) };
                Ok(json!({"qemu": {"major": major, "minor": minor, "micro": 3}, "package": "test"}))
            }
            "query-status" => Ok(json!({"status": "running", "running": true})),
            "getfd" => {
                let file = files.into_iter().next().ok_or("No file descriptor supplied via SCM_RIGHTS")?;
                self.named.insert(text("fdname"), file);
                done
            }
            "closefd" => {
                self.named.remove(&text("fdname")).ok_or("File descriptor named '' not found")?;
                done
            }
            "query-chardev" => {
                let devices = self.devices.lock().unwrap();
                let row = |(name, device): (&String, &Device)| {
                    let filename =
                        if device.is_closed { format!("disconnected:fd:{name}") } else { "unix:".into() };
                    json!({"label": name, "filename": filename, "frontend-open": true})
                };
                Ok(devices.iter().map(row).collect::<Vec<_>>().into())
            }
            "chardev-add" => {
                let name = &arguments["backend"]["data"]["addr"]["data"]["str"];
                let file =
                    self.named.remove(name.as_str().unwrap_or_default()).ok_or("no such descriptor")?;
                let device = Device { end: Some(file.into()), is_closed: false };
                self.devices.lock().unwrap().insert(id, device);
                done
            }
            "object-add" if self.is_new => {
                self.monitors.lock().unwrap().push(id.clone());
                self.serve(id);
                done
            }
            "object-del" => {
                let mut monitors = self.monitors.lock().unwrap();
                let at = monitors.iter().position(|monitor| *monitor == id).ok_or("object not found")?;
                monitors.remove(at);
                done
            }
            "chardev-remove" => {
                if self.monitors.lock().unwrap().contains(&id) {
                    return Err(format!("Chardev '{id}' is busy"));
                }
                self.devices.lock().unwrap().remove(&id).ok_or(format!("Chardev '{id}' not found"))?;
                done
            }
            other => Err(format!("The command {other} has not been found")),
        }
    }

    /// Answers on a monitor's connection. Removes the monitor and its device at its end (`close-action=delete`).
    fn serve(&self, id: String) {
        let (devices, monitors) = (Arc::clone(&self.devices), Arc::clone(&self.monitors));
        let end = devices.lock().unwrap().get_mut(&id).and_then(|device| device.end.take());
        let (Some(mut end), is_mute) = (end, self.is_mute) else { return };
        std::thread::spawn(move || {
            let greeting = json!({"QMP": {"version": {"qemu": {"major": 11}}, "capabilities": []}});
            if !is_mute && writeln!(end, "{greeting}").is_ok() {
                for line in BufReader::new(end.try_clone().unwrap()).lines().map_while(Result::ok) {
                    let command: Value = serde_json::from_str(&line).unwrap();
                    let _ = writeln!(end, "{}", json!({"return": "own", "id": command["id"]}));
                }
            }
            monitors.lock().unwrap().retain(|monitor| *monitor != id);
            devices.lock().unwrap().remove(&id);
        });
    }
}
