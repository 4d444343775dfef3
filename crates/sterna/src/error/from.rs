//! Causes become errors without the name of their area.

use super::{
    BadAnswer, BadGrant, BadMemory, BadPackage, BadPage, BadProtection, BadRound, ConfigurationDifference,
    MachineDifference, MemoryDifference, MigrationError, ProtectionDifference, RdmaDifference,
    SettingDifference, Untimely,
};

macro_rules! becomes {
    ($variant:ident: $($area:ty),*) => {
        $(impl From<$area> for MigrationError {
            fn from(why: $area) -> Self {
                Self::$variant(why.into())
            }
        })*
    };
}

becomes!(PeerMisbehaved: BadPage, BadRound, Untimely, BadPackage, BadAnswer, BadGrant, BadMemory, BadProtection);
becomes!(PeerIncompatible: ConfigurationDifference, SettingDifference, MachineDifference, MemoryDifference, RdmaDifference, ProtectionDifference);
