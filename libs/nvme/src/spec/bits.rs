//! How the specification's bit fields and numbers become types.

/// The low bits of a value that was masked before.
pub(super) mod low {
    macro_rules! low {
        ($($ty:ident)*) => {$(
            #[expect(clippy::cast_possible_truncation, reason = "the caller wants the low bits")]
            pub(crate) const fn $ty(value: u64) -> $ty {
                value as $ty
            }
        )*};
    }
    low!(u8 u16 u32);
    pub(crate) const fn u64(value: u64) -> u64 {
        value
    }
}

/// Declares a little-endian word of bit fields that can stand in a structure of the specification.
///
/// `field get / with: type [high:low]` is a number, `flag get / with [bit]` a bit. `with` keeps the low bits
/// of its argument that fit.
macro_rules! bit_fields {
    ($(#[$meta:meta])* $name:ident($repr:tt) { $($body:tt)* }) => {
        $(#[$meta])*
        #[derive(
            Clone, Copy, Default, PartialEq, Eq, Hash,
            zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::Immutable, zerocopy::KnownLayout,
            zerocopy::Unaligned,
        )]
        #[repr(transparent)]
        pub struct $name(bit_fields!(@wire $repr));

        impl $name {
            /// From the word's value.
            pub const fn from_bits(bits: $repr) -> Self {
                Self(bit_fields!(@new $repr, bits))
            }

            /// The word's value.
            pub const fn bits(self) -> $repr {
                bit_fields!(@get $repr, self.0)
            }

            bit_fields!(@fields $repr; $($body)*);
        }

        impl std::fmt::Debug for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                bit_fields!(@debug self, f, f.debug_struct(stringify!($name)); $($body)*)
            }
        }
    };

    (@wire u8) => { u8 };
    (@wire u16) => { zerocopy::little_endian::U16 };
    (@wire u32) => { zerocopy::little_endian::U32 };
    (@wire u64) => { zerocopy::little_endian::U64 };
    (@new u8, $bits:expr) => { $bits };
    (@new u16, $bits:expr) => { zerocopy::little_endian::U16::new($bits) };
    (@new u32, $bits:expr) => { zerocopy::little_endian::U32::new($bits) };
    (@new u64, $bits:expr) => { zerocopy::little_endian::U64::new($bits) };
    (@get u8, $word:expr) => { $word };
    (@get $repr:tt, $word:expr) => { $word.get() };

    (@fields $repr:tt;) => {};
    (@fields $repr:tt;
        $(#[$meta:meta])* field $get:ident / $with:ident: $ty:ident [$high:literal : $low:literal]; $($rest:tt)*
    ) => {
        $(#[$meta])*
        pub const fn $get(self) -> $ty {
            const MASK: u64 = u64::MAX >> (63 - ($high - $low));
            $crate::spec::bits::low::$ty((self.bits() as u64 >> $low) & MASK)
        }

        #[doc = concat!("With [`Self::", stringify!($get), "`] set to `value`.")]
        #[must_use]
        pub const fn $with(self, value: $ty) -> Self {
            const MASK: u64 = u64::MAX >> (63 - ($high - $low));
            let bits = (self.bits() as u64 & !(MASK << $low)) | ((value as u64 & MASK) << $low);
            Self::from_bits($crate::spec::bits::low::$repr(bits))
        }

        bit_fields!(@fields $repr; $($rest)*);
    };
    (@fields $repr:tt; $(#[$meta:meta])* flag $get:ident / $with:ident [$bit:literal]; $($rest:tt)*) => {
        $(#[$meta])*
        pub const fn $get(self) -> bool {
            self.bits() & (1 << $bit) != 0
        }

        #[doc = concat!("With [`Self::", stringify!($get), "`] set to `value`.")]
        #[must_use]
        pub const fn $with(self, value: bool) -> Self {
            let cleared = self.bits() & !(1 << $bit);
            Self::from_bits(if value { cleared | (1 << $bit) } else { cleared })
        }

        bit_fields!(@fields $repr; $($rest)*);
    };

    (@debug $self:ident, $f:ident, $built:expr;) => { $built.finish() };
    (@debug $self:ident, $f:ident, $built:expr;
        $(#[$meta:meta])* field $get:ident / $with:ident: $ty:ident [$high:literal : $low:literal]; $($rest:tt)*
    ) => {
        bit_fields!(@debug $self, $f, $built.field(stringify!($get), &$self.$get()); $($rest)*)
    };
    (@debug $self:ident, $f:ident, $built:expr;
        $(#[$meta:meta])* flag $get:ident / $with:ident [$bit:literal]; $($rest:tt)*
    ) => {
        bit_fields!(@debug $self, $f, $built.field(stringify!($get), &$self.$get()); $($rest)*)
    };
}

/// Declares a number with named values, of which any other value is as good a member.
macro_rules! open_enum {
    ($(#[$meta:meta])* $name:ident($repr:ident) {
        $($(#[$value_meta:meta])* $value:ident = $number:literal,)*
    }) => {
        $(#[$meta])*
        #[derive(
            Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash,
            zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::Immutable, zerocopy::KnownLayout,
        )]
        #[repr(transparent)]
        pub struct $name(pub $repr);

        impl $name {
            $($(#[$value_meta])* pub const $value: Self = Self($number);)*

            /// The value's name in this crate, if it has one.
            pub const fn name(self) -> Option<&'static str> {
                match self.0 {
                    $($number => Some(stringify!($value)),)*
                    _ => None,
                }
            }
        }

        impl std::fmt::Debug for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                match self.name() {
                    Some(name) => f.write_str(name),
                    None => write!(f, "{}({:#x})", stringify!($name), self.0),
                }
            }
        }
    };
}

pub(super) use {bit_fields, open_enum};
