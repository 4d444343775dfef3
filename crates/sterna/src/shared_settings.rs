//! Settings that both sides of a migration must share, for a destination that makes its VM from the source's
//! configuration (specs/extension.md §15).

use std::collections::BTreeMap;
use std::time::Duration;

use crate::codec;
use crate::error::ConfigurationDifference;
use crate::params::{Capabilities, Compression, Parameters};

const CHANNELS: &str = "multifd-channels";
const COMPRESSION: &str = "multifd-compression";
const POSTCOPY: &str = "postcopy-ram";
const PREEMPT: &str = "postcopy-preempt";
const SWITCHOVER_ACK: &str = "switchover-ack";
const WINDOW: &str = "x-sterna-reconnect-window";
const ON: &str = "on";

/// The settings that are on, by their names on the wire.
pub(crate) type Settings = BTreeMap<String, String>;

/// Where a destination that makes its VM from the source's configuration takes the settings from that both sides must
/// share: multifd and its channels and compression, postcopy, `switchover-ack`, and the reconnect window.
///
/// All other settings are the destination's own [`Parameters`] and [`Capabilities`].
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum SharedSettings {
    /// From this side's [`Parameters`] and [`Capabilities`]. A source with others is refused before its VM is made, with two
    /// exceptions. The reconnect window is not compared: each side uses its own, and 0 at one side switches it off. A
    /// destination that permits postcopy accepts a source that does not use it.
    #[default]
    AsHere,
    /// From the source, within these limits.
    AsSource(SettingLimits),
}

/// The settings of a source that a destination accepts ([`SharedSettings::AsSource`]).
///
/// Later versions add fields: write `SettingLimits { multifd_channels, ..SettingLimits::default() }`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SettingLimits {
    /// Most multifd channels. Each takes a thread and a descriptor. 0: a source with multifd is refused.
    pub multifd_channels: u8,
    /// The accepted compressions; uncompressed pages are always accepted.
    pub compressions: Vec<Compression>,
    /// Whether postcopy is accepted. It is refused, too, if this host does not support it: [`Incoming::listen_with`] finds
    /// out, by system calls that a sandbox must permit ([`Feature::Postcopy`]).
    ///
    /// [`Incoming::listen_with`]: crate::Incoming::listen_with
    /// [`Feature::Postcopy`]: crate::sandbox::Feature::Postcopy
    pub postcopy: bool,
    /// The longest reconnect window. This side keeps the guest's memory for this time, and `limits.stall`, after its
    /// source has disappeared.
    pub reconnect_window: Duration,
}

impl Default for SettingLimits {
    /// Everything that this version supports, and a reconnect window of ten minutes.
    fn default() -> Self {
        Self {
            multifd_channels: u8::MAX,
            compressions: vec![Compression::Zlib, Compression::Zstd],
            postcopy: true,
            reconnect_window: Duration::from_secs(600),
        }
    }
}

/// The shared settings of one side.
pub(crate) fn of(params: &Parameters, capabilities: &Capabilities) -> Settings {
    let on = |is_on: bool| is_on.then(|| ON.to_owned());
    let multifd = capabilities.multifd;
    let compression = word(params.multifd_compression).filter(|_| multifd);
    let window = params.reconnect_window.as_millis();
    let all = [
        (CHANNELS, multifd.then(|| params.multifd_channels.to_string())),
        (COMPRESSION, compression.map(str::to_owned)),
        (POSTCOPY, on(capabilities.postcopy_ram)),
        (PREEMPT, on(capabilities.postcopy_preempt)),
        (SWITCHOVER_ACK, on(capabilities.switchover_ack)),
        (WINDOW, (window > 0).then(|| window.to_string())),
    ];
    all.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))).collect()
}

impl SharedSettings {
    /// Whether a source may use postcopy. `own` are the destination's capabilities.
    pub(crate) fn permits_postcopy(&self, own: &Capabilities) -> bool {
        match self {
            Self::AsHere => own.postcopy_ram,
            Self::AsSource(limits) => limits.postcopy,
        }
    }

    /// The destination's settings for a source with `theirs`.
    pub(crate) fn agree(
        &self,
        theirs: &Settings,
        mut params: Parameters,
        mut capabilities: Capabilities,
    ) -> Result<(Parameters, Capabilities), ConfigurationDifference> {
        match self {
            Self::AsHere => compare(theirs, &of(&params, &capabilities))?,
            Self::AsSource(limits) => limits.take(theirs, &mut params, &mut capabilities)?,
        }
        Ok((params, capabilities))
    }
}

/// Compares the settings of both sides, where a difference would let the migration fail later.
fn compare(theirs: &Settings, ours: &Settings) -> Result<(), ConfigurationDifference> {
    let names = theirs.keys().chain(ours.keys());
    for name in names {
        let (there, here) = (theirs.get(name), ours.get(name));
        let may_differ = match name.as_str() {
            // A lost connection is replaced only if both sides have set it.
            WINDOW => true,
            // A destination may be ready for a postcopy that does not happen.
            POSTCOPY => there.is_none(),
            PREEMPT => !theirs.contains_key(POSTCOPY),
            _ => false,
        };
        if there != here && !may_differ {
            return Err(refused(name, theirs, format!("only {}", here.map_or("off", String::as_str))));
        }
    }
    Ok(())
}

impl SettingLimits {
    /// Stores the source's settings, if all of them are accepted.
    fn take(
        &self,
        theirs: &Settings,
        params: &mut Parameters,
        capabilities: &mut Capabilities,
    ) -> Result<(), ConfigurationDifference> {
        (capabilities.multifd, params.multifd_compression) = (false, Compression::None);
        (capabilities.postcopy_ram, capabilities.postcopy_preempt) = (false, false);
        (capabilities.switchover_ack, params.reconnect_window) = (false, Duration::ZERO);
        for (name, value) in theirs {
            let limit = match name.as_str() {
                CHANNELS => {
                    capabilities.multifd = true;
                    let most = u64::from(self.multifd_channels);
                    number(value, most).map(|channels| params.multifd_channels = channels as u8)
                }
                COMPRESSION => {
                    self.compression(value).map(|compression| params.multifd_compression = compression)
                }
                POSTCOPY | PREEMPT if !self.postcopy => Err("only off".to_owned()),
                POSTCOPY => on(value, &mut capabilities.postcopy_ram),
                PREEMPT => on(value, &mut capabilities.postcopy_preempt),
                SWITCHOVER_ACK => on(value, &mut capabilities.switchover_ack),
                WINDOW => {
                    let most = u64::try_from(self.reconnect_window.as_millis()).unwrap_or(u64::MAX);
                    let window = number(value, most);
                    window.map(|window| params.reconnect_window = Duration::from_millis(window))
                }
                _ => Err("only off, because its version does not know this setting".to_owned()),
            };
            limit.map_err(|limit| refused(name, theirs, limit))?;
        }
        Ok(())
    }

    fn compression(&self, value: &str) -> Result<Compression, String> {
        // A codec may be left out of this program.
        let is_here = |compression: &&Compression| codec::decoder(**compression).is_ok();
        let accepted: Vec<_> = self.compressions.iter().filter(is_here).copied().collect();
        let found = accepted.iter().find(|compression| word(**compression) == Some(value));
        found.copied().ok_or_else(|| {
            let names = accepted.iter().filter_map(|compression| word(*compression));
            format!("only {}", ["off"].into_iter().chain(names).collect::<Vec<_>>().join(", "))
        })
    }
}

/// The compression's value on the wire; `None` if pages are not compressed.
fn word(compression: Compression) -> Option<&'static str> {
    match compression {
        Compression::None => None,
        Compression::Zlib => Some("zlib"),
        Compression::Zstd => Some("zstd"),
    }
}

/// A number from 1 to `most`, or the text of the limit.
fn number(value: &str, most: u64) -> Result<u64, String> {
    let number = value.parse().ok().filter(|number| (1..=most).contains(number));
    number.ok_or_else(|| if most == 0 { "only off".to_owned() } else { format!("1 to {most}") })
}

fn on(value: &str, setting: &mut bool) -> Result<(), String> {
    *setting = value == ON;
    if *setting { Ok(()) } else { Err("on and off".to_owned()) }
}

fn refused(name: &str, theirs: &Settings, limit: String) -> ConfigurationDifference {
    let value = theirs.get(name).cloned();
    ConfigurationDifference::Setting { setting: name.to_owned(), value, limit }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(list: &[(&str, &str)]) -> Settings {
        list.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    fn source() -> (Parameters, Capabilities) {
        let params = Parameters {
            multifd_channels: 7,
            multifd_compression: Compression::Zstd,
            reconnect_window: Duration::from_millis(4500),
            ..Parameters::default()
        };
        let capabilities = Capabilities {
            multifd: true,
            postcopy_ram: true,
            postcopy_preempt: true,
            switchover_ack: true,
            ..Capabilities::default()
        };
        (params, capabilities)
    }

    /// The refusal, as text.
    fn refusal(shared: &SharedSettings, theirs: &[(&str, &str)]) -> String {
        let agreed = shared.agree(&settings(theirs), Parameters::default(), Capabilities::default());
        agreed.expect_err("a refusal").to_string()
    }

    #[test]
    fn destination_takes_every_shared_setting_over_and_keeps_its_own() {
        let (params, capabilities) = source();
        let theirs = of(&params, &capabilities);
        let own = Parameters { max_bandwidth_bytes: 77, multifd_channels: 3, ..Parameters::default() };
        let shared = SharedSettings::AsSource(SettingLimits::default());
        let (agreed, switched) = shared.agree(&theirs, own, Capabilities::default()).unwrap();

        assert_eq!(of(&agreed, &switched), theirs);
        assert_eq!((agreed.max_bandwidth_bytes, switched), (77, capabilities));
        // What is off at the source becomes off here, whatever this side had set.
        let (agreed, switched) = shared.agree(&Settings::new(), params, capabilities).unwrap();
        assert_eq!(of(&agreed, &switched), Settings::new());
    }

    #[test]
    fn limits_are_named_with_their_setting() {
        let limits = SettingLimits {
            multifd_channels: 4,
            compressions: vec![Compression::Zlib],
            postcopy: false,
            reconnect_window: Duration::from_secs(5),
        };
        let shared = SharedSettings::AsSource(limits);
        for (name, value, limit) in [
            ("multifd-channels", "5", "1 to 4"),
            ("multifd-channels", "0", "1 to 4"),
            ("multifd-channels", "99999999999999999999", "1 to 4"),
            ("multifd-compression", "zstd", "only off, zlib"),
            ("multifd-compression", "qpl", "only off, zlib"),
            ("postcopy-ram", "on", "only off"),
            ("postcopy-preempt", "on", "only off"),
            ("switchover-ack", "maybe", "on and off"),
            ("x-sterna-reconnect-window", "5001", "1 to 5000"),
            ("x-of-a-later-version", "on", "does not know this setting"),
        ] {
            let text = refusal(&shared, &[(name, value)]);
            assert!(text.contains(name) && text.contains(value) && text.contains(limit), "{text}");
        }
        assert!(!shared.permits_postcopy(&source().1), "this side's own setting does not count");
        let none =
            SharedSettings::AsSource(SettingLimits { multifd_channels: 0, ..SettingLimits::default() });
        assert!(refusal(&none, &[("multifd-channels", "1")]).contains("accepts only off"));
    }

    #[test]
    fn own_settings_are_compared_where_a_difference_would_fail_later() {
        let (params, capabilities) = source();
        let theirs = of(&params, &capabilities);
        let agree = |params: &Parameters, capabilities: Capabilities| {
            SharedSettings::AsHere.agree(&theirs, params.clone(), capabilities)
        };
        assert!(agree(&params, capabilities).is_ok());
        let without = Parameters { reconnect_window: Duration::ZERO, ..params.clone() };
        assert!(agree(&without, capabilities).is_ok(), "no connection is replaced then");
        let fewer = Parameters { multifd_channels: 2, ..params.clone() };
        let text = agree(&fewer, capabilities).unwrap_err().to_string();
        assert!(text.contains("multifd-channels is 7") && text.contains("only 2"), "{text}");
        let off = Capabilities { postcopy_preempt: false, ..capabilities };
        let text = agree(&params, off).unwrap_err().to_string();
        assert!(text.contains("postcopy-preempt is on") && text.contains("only off"), "{text}");

        let ready = SharedSettings::AsHere.agree(&Settings::new(), Parameters::default(), {
            Capabilities { postcopy_ram: true, postcopy_preempt: true, ..Capabilities::default() }
        });
        assert!(ready.is_ok(), "{ready:?}");
        assert!(SharedSettings::AsHere.permits_postcopy(&capabilities));
        assert!(!SharedSettings::AsHere.permits_postcopy(&Capabilities::default()));
        let waits = Capabilities { multifd: true, ..Capabilities::default() };
        let text = SharedSettings::AsHere.agree(&Settings::new(), Parameters::default(), waits);
        let text = text.unwrap_err().to_string();
        assert!(text.contains("multifd-channels is off") && text.contains("only 2"), "{text}");
    }
}
