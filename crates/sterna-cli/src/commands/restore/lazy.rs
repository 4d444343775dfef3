//! `sterna restore --lazy`: starts the guest immediately, and loads its memory while it runs.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use sterna_drive::restore::launch::Launched;
use sterna_drive::restore::lazy::{LazilyRestored, LazyFailure, LazyRequest, restore_lazily};
use sterna_drive::restore::{RestoreRequest, Subject};
use sterna_drive::{DriveError, Vm};
use sterna_opaque::serve::{GuestState, ImageOptions};
use sterna_qmp::Endpoint;

use super::{Arguments, place};
use crate::commands::serve::{access_name, figures};
use crate::exit::{Done, Status, Stop};
use crate::monitor::unreachable;
use crate::terminal;
use crate::units;
use crate::watch::Watcher;

/// Restores lazily, into the VM of the command line or into one that this command starts.
pub fn restore(arguments: &Arguments, asked: &RestoreRequest, watcher: &mut Watcher<'_>) -> Done {
    let subject = Subject::examine(&asked.path, &asked.access)?;
    let options = ImageOptions {
        direct: asked.direct,
        opening: asked.access.clone(),
        // As with an ordinary restore, a damaged image is used with a warning. The VM refuses state that it
        // cannot load.
        force_damaged: true,
        ..ImageOptions::default()
    };
    let image = Arc::new(arguments.reading.open(&arguments.image, options)?);
    let kind = (subject.format().name(), access_name(image.access()), image.is_direct());
    let directory = place::directory()
        .map_err(|error| Stop::failed(format!("cannot create a directory for the VM's sockets: {error}")))?;
    let request = LazyRequest {
        start: asked.start,
        reconnect_window: Duration::from_secs(arguments.reconnect_window),
        directory: directory.path(),
    };
    let Some(target) = &arguments.target else {
        let mut launched = Launched::start(&arguments.command, directory.path())?;
        let mut vm = launched.vm(watcher)?;
        let restored = restore_lazily(&mut vm, &subject, image, &request, watcher);
        if matches!(&restored, Ok(_) | Err(LazyFailure { guest: GuestState::NeedsImage, .. })) {
            let _ = directory.keep();
            return match restored {
                Ok(restored) => {
                    let done = tell(arguments, &kind, &restored, Some(&launched));
                    launched.release();
                    done
                }
                Err(failure) => {
                    let at = format!("; its process is {}", launched.id());
                    launched.release();
                    Err(Stop::from(failure.error).with_more(&at))
                }
            };
        }
        let failure =
            restored.err().map_or_else(|| DriveError::Failed(String::new()), |failure| failure.error);
        return Err(Stop::from(failure).with_more(&launched.said()));
    };
    let endpoint: Endpoint = target.strip_prefix("qmp:").unwrap_or(target).parse().map_err(Stop::usage)?;
    let mut vm = Vm::connect_oob(&endpoint).map_err(|error| unreachable(&endpoint, &error))?;
    match restore_lazily(&mut vm, &subject, image, &request, watcher) {
        Ok(restored) => tell(arguments, &kind, &restored, None),
        Err(failure) => Err(failure.error.into()),
    }
}

type Kind = (&'static str, &'static str, bool);

fn tell(arguments: &Arguments, kind: &Kind, restored: &LazilyRestored, launched: Option<&Launched>) -> Done {
    for warning in &restored.warnings {
        terminal::note(&format!("sterna: warning: {warning}"));
    }
    terminal::print(&if arguments.json {
        to_json(arguments, kind, restored, launched)
    } else {
        table(arguments, kind, restored, launched)
    });
    if restored.should_run && !restored.is_running {
        return Err(Stop::failed(
            "the guest has all of its memory but could not be started: keep the image, and see the warnings above",
        ));
    }
    Ok(Status::Done)
}

fn table(
    arguments: &Arguments,
    kind: &Kind,
    restored: &LazilyRestored,
    launched: Option<&Launched>,
) -> String {
    let (form, _, is_direct) = kind;
    let statistics = &restored.statistics;
    let mut text = String::new();
    let mut row = |name: &str, value: String| text += &format!("{name:<12} {value}\n");
    row("restored", arguments.image.display().to_string());
    row("form", (*form).to_owned());
    row("guest", if restored.is_running { "runs" } else { "is stopped; `cont` starts it" }.into());
    row("guest ran", format!("after {}", units::seconds(restored.until_guest.as_secs_f64())));
    row("guest RAM", units::bytes(statistics.total_pages * units::PAGE_BYTES));
    let past = if *is_direct { ", direct I/O" } else { "" };
    row("total time", format!("{}{past}", units::seconds(restored.total.as_secs_f64())));
    row("pages", format!("{} with content, {} zero", statistics.content_pages, statistics.zero_pages));
    let own = if restored.preempt { ", over a separate connection" } else { "" };
    row("requested", format!("{} pages{own}", statistics.requested_pages));
    if statistics.recoveries > 0 {
        row("recoveries", statistics.recoveries.to_string());
    }
    if let Some(launched) = launched {
        row("process", launched.id().to_string());
        row("monitor", launched.socket().display().to_string());
        row("messages", launched.log().display().to_string());
    }
    text
}

fn to_json(
    arguments: &Arguments,
    kind: &Kind,
    restored: &LazilyRestored,
    launched: Option<&Launched>,
) -> String {
    let (form, access, is_direct) = kind;
    let mut value = json!({
        "schema": "sterna-restore",
        "version": 1,
        "image": arguments.image.display().to_string(),
        "format": form,
        "lazy": true,
        "access": access,
        "is_running": restored.is_running,
        "preempt": restored.preempt,
        "direct_io": is_direct,
        "warnings": restored.warnings,
        "process": launched.map(Launched::id),
        "monitor": launched.map(|launched| launched.socket().display().to_string()),
        "messages": launched.map(|launched| launched.log().display().to_string()),
    });
    if let (Some(object), Value::Object(figures)) = (value.as_object_mut(), figures(&restored.statistics)) {
        object.extend(figures);
        // These times cover the whole command, not only the connection.
        object.insert("time_until_guest".into(), json!(restored.until_guest.as_secs_f64()));
        object.insert("total_time".into(), json!(restored.total.as_secs_f64()));
    }
    format!("{value:#}\n")
}
