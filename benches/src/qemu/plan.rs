//! Chooses the measurements and their settings.

use std::path::Path;

use crate::chain::Chain;
use crate::content::Content;
use crate::figures::{Kind, Row};
use crate::group::Group;
use crate::limits::{self, Memory};
use crate::tools::Tool;
use crate::{Failure, image, live};
use sterna_benches::machines::{Lab, Role, Side};
use sterna_benches::peer::Settings;

/// RAM of the guest that writes, in bytes.
pub const WRITER_BYTES: u64 = 512 << 20;
/// Numbers of sockets for the limits over loopback.
const SOCKETS: [usize; 4] = [1, 2, 4, 8];

/// All settings, or only the settings that are fastest elsewhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Width {
    All,
    Few,
}

/// The chains of both sides, which every group uses.
pub struct Chains<'a> {
    pub qemu: Chain<'a>,
    pub sterna: Chain<'a>,
    pub content: &'a Content,
    pub width: Width,
}

impl<'a> Chains<'a> {
    pub fn new(lab: &'a Lab, content: &'a Content, width: Width) -> Self {
        let chain = |side| Chain::new(lab, side, content);
        Self { qemu: chain(Side::Qemu), sterna: chain(Side::Sterna), content, width }
    }

    fn each(&self) -> [(&Chain<'a>, Kind, &'static str); 2] {
        [(&self.qemu, Kind::Qemu, "QEMU"), (&self.sterna, Kind::Sterna, "Sterna")]
    }
}

/// Migration of a stopped guest over loopback.
pub fn live<'a>(chains: &'a Chains<'_>, about: &str, memory: Option<&'a Memory>) -> Group<'a> {
    let mut group = Group::new(vec![format!("Migration over loopback, idle guest: {about}")]);
    let channels: &[Option<u8>] = match chains.width {
        Width::All => &[None, Some(1), Some(2), Some(4), Some(8)],
        Width::Few => &[None, Some(2), Some(4)],
    };
    for (chain, kind, name) in chains.each() {
        for &channels in channels {
            let settings = Settings { channels, ..Settings::default() };
            group.row(&Row::new(format!("{name} {}", channels_name(channels)), kind), move |check| {
                Ok(vec![live::idle(chain, &settings, Role::Destination, check)?])
            });
        }
        if chains.width == Width::All {
            let settings = Settings { channels: Some(2), ..Settings::default() };
            let row = Row::new(format!("{name} multifd 2, fresh destination"), Kind::Aside);
            group.row(&row, move |check| {
                Ok(vec![live::idle(chain, &settings, Role::FreshDestination, check)?])
            });
        }
    }
    let bytes = chains.content.used_bytes();
    if memory.is_some() {
        let row = Row::new("memory copy, 1 thread", Kind::Aside);
        group.row(&row, move |_| Ok(vec![limits::copy_memory(bytes)?]));
    }
    for sockets in SOCKETS {
        let Some(memory) = memory else { break };
        let name = format!(
            "plain copy, {}",
            if sockets == 1 { "1 socket".into() } else { format!("{sockets} sockets") }
        );
        group.row(&Row::new(name, Kind::Limit), move |_| Ok(vec![memory.over_loopback(bytes, sockets)?]));
    }
    group
}

/// Save and restore in `place`.
pub fn images<'a>(chains: &'a Chains<'_>, about: &str, place: &'a Path, tools: &'a [Tool]) -> Group<'a> {
    let titles = ["Save", "Restore"].map(|what| format!("{what}: {about}"));
    let mut group = Group::new(titles.to_vec());
    for (chain, kind, name) in chains.each() {
        for settings in image_settings(chains.width) {
            let row = Row::new(format!("{name} {}", image_name(&settings)), kind);
            group.row(&row, move |check| image::own(chain, &settings, place, check));
        }
    }
    for tool in tools.iter().filter(|tool| chains.width == Width::All || tool.matters) {
        let row = Row::new(format!("a live QEMU by sterna save and restore, {}", tool.name), Kind::Tool);
        group.row(&row.against(tool.form), move |check| image::tool(&chains.qemu, tool, place, check));
    }
    let content = chains.content;
    if content.used_bytes() == 0 {
        return group;
    }
    group.row(&Row::new("raw file, O_DIRECT, 1 MiB, depth 8", Kind::Limit), move |_| {
        let (path, bytes) = (place.join("limit"), content.used_bytes());
        let done = limits::write_file(&path, bytes)
            .and_then(|written| Ok(vec![written, limits::read_file(&path, bytes)?]));
        // The file may never have been written.
        let _ = std::fs::remove_file(&path);
        done
    });
    group
}

/// Migration of a guest that writes all the time, the same in both machines.
pub fn writing<'a>(lab: &'a Lab, sector: &'a Path) -> Result<Group<'a>, Failure> {
    if !lab.kvm {
        return Err("/dev/kvm cannot be used here".into());
    }
    lab.boot_sector(WRITER_BYTES, sector)?;
    let mib = WRITER_BYTES >> 20;
    let title = format!(
        "Migration over loopback under full write load: boot sector that rewrites half of {mib} MiB, KVM"
    );
    let mut group = Group::new(vec![title]);
    for (side, kind, name) in [(Side::Qemu, Kind::Qemu, "QEMU"), (Side::Sterna, Kind::Sterna, "Sterna")] {
        for channels in [None, Some(2)] {
            let settings = Settings { channels, ..Settings::default() };
            group.row(&Row::new(format!("{name} {}", channels_name(channels)), kind), move |_| {
                Ok(vec![live::writing(lab, side, WRITER_BYTES, sector, &settings)?])
            });
        }
    }
    Ok(group)
}

fn channels_name(channels: Option<u8>) -> String {
    channels.map_or("main channel".into(), |channels| format!("multifd {channels}"))
}

fn image_settings(width: Width) -> Vec<Settings> {
    let of = |channels, direct| Settings { channels, mapped: true, direct };
    match width {
        Width::Few => {
            vec![
                Settings::default(),
                of(Some(4), false),
                of(Some(2), true),
                of(Some(4), true),
                of(Some(8), true),
            ]
        }
        Width::All => {
            let mut all = vec![Settings::default()];
            for direct in [false, true] {
                all.extend([None, Some(2), Some(4), Some(8)].map(|channels| of(channels, direct)));
            }
            all
        }
    }
}

fn image_name(settings: &Settings) -> String {
    if !settings.mapped {
        return "legacy".into();
    }
    let channels = settings.channels.map_or(String::new(), |channels| format!(", multifd {channels}"));
    format!("mapped-ram{channels}{}", if settings.direct { ", direct-io" } else { "" })
}
