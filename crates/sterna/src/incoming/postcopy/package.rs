//! The package: LISTEN, the devices, and RUN or the question to prepare (specs/postcopy.md §2).

use std::sync::Arc;

use sterna_proto::destination::Event as Fed;
use sterna_wire::extension;
use sterna_wire::main::{Command, MainItem, SectionKind};
use sterna_wire::return_path::ReturnMessage;

use crate::error::{BadPackage, MigrationError};
use crate::incoming::shared::Shared;
use crate::incoming::target::Section;

/// Checks that the package begins with LISTEN and contains only permitted elements. Returns the elements after
/// LISTEN.
pub(super) fn check(items: Vec<MainItem>) -> Result<Vec<MainItem>, MigrationError> {
    let mut items = items.into_iter();
    let first = items.next();
    if !matches!(first, Some(MainItem::Command(Command::PostcopyListen))) {
        return Err(BadPackage::NoListen.into());
    }
    let rest: Vec<_> = items.collect();
    let belongs = |item: &MainItem| match item {
        MainItem::Command(Command::Ping(_) | Command::PostcopyRun) => true,
        MainItem::Section { kind, .. } => *kind == SectionKind::Full,
        _ => false,
    };
    if let Some(at) = rest.iter().position(|item| !belongs(item)) {
        // The message names the position, not the element, which may be long.
        return Err(BadPackage::Element { element: at + 2 }.into());
    }
    let is_run = |item: &MainItem| matches!(item, MainItem::Command(Command::PostcopyRun));
    if rest.iter().rev().skip(1).any(is_run) {
        return Err(BadPackage::AfterRun.into());
    }
    Ok(rest)
}

/// Loads the devices. A device may wait for pages.
pub(super) fn load(shared: &Arc<Shared>, items: Vec<MainItem>) -> Result<(), MigrationError> {
    for item in items {
        if shared.is_stopping() {
            return Ok(());
        }
        match item {
            MainItem::Command(Command::Ping(extension::PREPARE_PING)) => shared.report(Fed::PrepareRead),
            MainItem::Command(Command::Ping(value)) => shared.say(&ReturnMessage::Pong(value))?,
            MainItem::Command(Command::PostcopyRun) => {
                shared.postcopy.commands.lock().runs()?;
                shared.report(Fed::RunRead);
            }
            MainItem::Section { name, instance, version, kind, body } => {
                let section = Section { id: 0, name: &name, instance, version, kind, body: &body };
                shared.target.section(&section)?;
            }
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Misbehaviour;

    fn command(command: Command) -> MainItem {
        MainItem::Command(command)
    }

    fn device(kind: SectionKind) -> MainItem {
        MainItem::Section { name: "clock".into(), instance: 0, version: 1, kind, body: Vec::new() }
    }

    #[test]
    fn package_is_listen_devices_pings_and_run() {
        let listen = || command(Command::PostcopyListen);
        let run = || command(Command::PostcopyRun);
        let rest =
            check(vec![listen(), device(SectionKind::Full), command(Command::Ping(3)), run()]).unwrap();
        assert_eq!(rest.len(), 3);
        check(vec![listen(), device(SectionKind::Full), command(Command::Ping(0x42))]).unwrap();

        for wrong in [
            vec![],
            vec![device(SectionKind::Full), listen()],
            vec![listen(), device(SectionKind::Start)],
            vec![listen(), listen()],
            vec![listen(), run(), device(SectionKind::Full)],
            vec![listen(), MainItem::Eof],
            vec![listen(), MainItem::Zero { block: 0, offset: 0 }],
            vec![listen(), command(Command::OpenReturnPath)],
        ] {
            let error = check(wrong).unwrap_err();
            assert!(matches!(error, MigrationError::PeerMisbehaved(Misbehaviour::Package(_))), "{error}");
        }
    }
}
