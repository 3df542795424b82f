"""Pure functions from analysed runs to Plotly figures; none of them knows Streamlit."""
